/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz.h - numbers out of libFuzzer's bytes. At the end of the bytes all numbers are 0. */
#ifndef TESTS_FUZZ_FUZZ_H
#define TESTS_FUZZ_FUZZ_H

#include <colobridge.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct fuzz {
    const uint8_t *data;
    size_t left;
} fuzz_t;

static inline void fuzz_bytes(fuzz_t *f, void *to, size_t n)
{
    const size_t k = n < f->left ? n : f->left;
    memset(to, 0, n);
    memcpy(to, f->data, k);
    f->data += k;
    f->left -= k;
}

static inline uint8_t fuzz_u8(fuzz_t *f)
{
    uint8_t v;
    fuzz_bytes(f, &v, 1);
    return v;
}

/* lo..hi */
static inline int64_t fuzz_range(fuzz_t *f, int64_t lo, int64_t hi)
{
    return lo + fuzz_u8(f) % (hi - lo + 1);
}

/* Mostly small, at times anything. */
static inline int64_t fuzz_i64(fuzz_t *f)
{
    const uint8_t kind = fuzz_u8(f);
    int64_t v;
    if (kind < 192)
        return kind % 24 - 2;
    fuzz_bytes(f, &v, sizeof v);
    return v;
}

#define FUZZ_CHECK(cond, ...)                                          \
    do {                                                               \
        if (!(cond)) {                                                 \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond); \
            fprintf(stderr, __VA_ARGS__);                              \
            fprintf(stderr, "\n");                                     \
            abort();                                                   \
        }                                                              \
    } while (0)

/* A refusal says why. */
#define FUZZ_REFUSED(st) \
    FUZZ_CHECK((st) < 0 && colo_last_error()[0], "status %d, no words", (int)(st))

#endif
