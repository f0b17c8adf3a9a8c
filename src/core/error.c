/* SPDX-License-Identifier: Apache-2.0 */
/*
 * error.c - the error policy in one place.
 *
 * Every failing path calls colo_fail() once, where the numbers are known, and hands the status up
 * unchanged. The error message is thread-local: in-process ranks each keep their own. Nothing here
 * prints; the program that embeds the library decides what to show.
 */
#include "core/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local colo_error_t error;

/* clang-format off */
#define WORDS(status, text) {status, #status, text}
static const struct {
    colo_status_t status;
    const char *name, *text;
} words[] = {
    WORDS(COLO_OK, "ok"),
    WORDS(COLO_PENDING, "work is enqueued; ask again"),
    WORDS(COLO_ERR_ARG, "an argument is outside its stated range"),
    WORDS(COLO_ERR_SHAPE, "a tensor's shape, dtype or strides do not match the plan"),
    WORDS(COLO_ERR_LAYOUT, "these grids or layouts cannot be combined"),
    WORDS(COLO_ERR_NOMEM, "memory could not be allocated"),
    WORDS(COLO_ERR_TIMEOUT, "another rank did not arrive before the deadline"),
    WORDS(COLO_ERR_PEER, "another rank reported an error"),
    WORDS(COLO_ERR_MISMATCH, "ranks disagree about what they are doing together"),
    WORDS(COLO_ERR_MODIFIED, "a saved tensor was written after it was saved"),
    WORDS(COLO_ERR_STATE, "the object is not in a state that allows this call"),
    WORDS(COLO_ERR_UNBUILT, "this build or this machine lacks the backend"),
    WORDS(COLO_ERR_CONTRACT, "the data are not as declared (replicated, zero)"),
    WORDS(COLO_ERR_EXISTS, "the name is already taken"),
    WORDS(COLO_ERR_MISSING, "no object of that name exists"),
    WORDS(COLO_ERR_IO, "a file could not be read or written"),
    WORDS(COLO_ERR_ABORTED, "the communicator was aborted"),
    WORDS(COLO_ERR_CUDA, "CUDA reported an error"),
    WORDS(COLO_ERR_NCCL, "NCCL reported an error"),
    WORDS(COLO_ERR_MPI, "MPI reported an error"),
};
#undef WORDS
/* clang-format on */

const char *colo_status_string(colo_status_t status)
{
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (words[i].status == status)
            return words[i].text;
    return "unknown status";
}

const char *colo_status_name(colo_status_t status)
{
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (words[i].status == status)
            return words[i].name;
    return "COLO_?";
}

const char *colo_last_error(void)
{
    return error.text;
}

colo_status_t colo_fail(colo_status_t status, const char *fmt, ...)
{
    char text[COLO_ERROR_MAX]; /* arguments may point into the old error message */
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    size_t n = strlen(text); /* messages name what was to be allocated: "plan: 12 blocks" */
    if (status == COLO_ERR_NOMEM && !strstr(text, "no memory") && !strstr(text, "out of memory"))
        snprintf(text + n, sizeof text - n, ": no memory");
    memcpy(error.text, text, sizeof error.text);
    return status;
}

colo_status_t colo_fail_prefix(colo_status_t status, const char *fmt, ...)
{
    char text[COLO_ERROR_MAX];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (n < 0)
        n = 0;
    if ((size_t)n + 2 < sizeof text)
        snprintf(text + n, sizeof text - (size_t)n, ": %.*s", (int)(sizeof text - (size_t)n) - 3,
                 error.text);
    memcpy(error.text, text, sizeof error.text);
    return status;
}

colo_error_t colo_error_save(void)
{
    return error;
}

colo_status_t colo_error_restore(colo_status_t status, const colo_error_t *e)
{
    error = *e;
    return status;
}

void colo_put(colo_text_t *text, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    const bool fits = text->len < text->cap;
    const int n =
        vsnprintf(fits ? text->data + text->len : NULL, fits ? text->cap - text->len : 0, fmt, ap);
    va_end(ap);
    text->len += n > 0 ? (size_t)n : 0;
}

void colo_autofree_(void *p)
{
    free(*(void **)p);
}
