/* SPDX-License-Identifier: Apache-2.0 */
/* error.h (private) - how a status and its error message travel. */
#ifndef COLO_CORE_ERROR_H
#define COLO_CORE_ERROR_H

#include <colobridge/status.h>

/* A function of libcolobridge.so that modules call, too: exported as COLOBRIDGE_PRIVATE_0
 * (src/colobridge.map), in no public header. */
#define COLO_FOR_MODULES COLO_API

/* Sets colo_last_error() of this thread and returns @status. The error message carries the numbers:
 * which rank, which argument, expected, found. */
COLO_FOR_MODULES colo_status_t colo_fail(colo_status_t status, const char *fmt, ...)
    COLO_PRINTF(2, 3);

/* The same, keeping the error message that is there and putting "fmt: " in front of it. */
colo_status_t colo_fail_prefix(colo_status_t status, const char *fmt, ...) COLO_PRINTF(2, 3);

/* This thread's error message, kept while a call may replace it. */
enum { COLO_ERROR_MAX = 1024 };
typedef struct colo_error {
    char text[COLO_ERROR_MAX];
} colo_error_t;
COLO_FOR_MODULES colo_error_t colo_error_save(void);
/* Returns @status. */
COLO_FOR_MODULES colo_status_t colo_error_restore(colo_status_t status, const colo_error_t *e);

/* A text that grows, in @cap bytes with its end. @len: its whole length, even if it is cut off. */
typedef struct colo_text {
    char *data;
    size_t cap, len;
} colo_text_t;
void colo_put(colo_text_t *text, const char *fmt, ...) COLO_PRINTF(2, 3);

#define COLO_TRY(expr)             \
    do {                           \
        colo_status_t s_ = (expr); \
        if (s_ < 0)                \
            return s_;             \
    } while (0)

/* A refusal: a status, and its message as printf has it. */
#define COLO_FAIL_IF(condition, ...)       \
    do {                                   \
        if (condition)                     \
            return colo_fail(__VA_ARGS__); \
    } while (0)

/* The next of several calls, if none before it failed. @st: a status, or one of CUDA or NCCL. */
#define COLO_THEN(st, expr) \
    do {                    \
        if ((st) == 0)      \
            (st) = (expr);  \
    } while (0)

#define COLO_TRY_GOTO(st, expr, label) \
    do {                               \
        (st) = (expr);                 \
        if ((st) < 0)                  \
            goto label;                \
    } while (0)

/* Host workspace inside one function only. */
COLO_FOR_MODULES void colo_autofree_(void *p);
#define COLO_AUTOFREE __attribute__((cleanup(colo_autofree_)))

/* a * b and a + b of non-negative int64, false on overflow */
static inline bool colo_mul_ok(int64_t a, int64_t b, int64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool colo_add_ok(int64_t a, int64_t b, int64_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}
/* a, b >= 0 and not both 0 */
static inline int64_t colo_gcd(int64_t a, int64_t b)
{
    while (b) {
        int64_t r = a % b;
        a = b;
        b = r;
    }
    return a;
}

#endif
