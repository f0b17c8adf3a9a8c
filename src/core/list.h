/* SPDX-License-Identifier: Apache-2.0 */
/* list.h (private) - growing arrays, taking an element out of a linked list, sorting by and
 * searching int64_t members, and memory that is freed as a whole. */
#ifndef COLO_CORE_LIST_H
#define COLO_CORE_LIST_H

#include "core/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* The owner frees items. A list whose n is set to 0 keeps its memory for the next use. */
typedef struct colo_list {
    void *items;
    int64_t n, cap;
} colo_list_t;

/* Calls @end with the variable's address when its scope ends. */
#define COLO_ENDS(end) __attribute__((cleanup(end)))

static inline void colo_list_deinit(colo_list_t *list)
{
    free(list->items);
}

/* Memory for @n elements in all; false: there is none, and the list is as it was. It grows to twice
 * what it was at least, so that single pushes cost little. */
bool colo_list_reserve(colo_list_t *list, int64_t n, size_t size);
/* The place of one more element, or NULL. */
static inline void *colo_list_push(colo_list_t *list, size_t size)
{
    if (list->n == list->cap && !colo_list_reserve(list, list->n + 1, size))
        return NULL;
    return (char *)list->items + (size_t)list->n++ * size;
}
/* Appends a value, which is the last argument, or returns COLO_ERR_NOMEM with @words about how many
 * elements there are. */
#define COLO_PUSH(list, words, ...)                                               \
    do {                                                                          \
        __typeof__(__VA_ARGS__) *place_ = colo_list_push((list), sizeof *place_); \
        COLO_FAIL_IF(!place_, COLO_ERR_NOMEM, words, (long long)(list)->n);       \
        *place_ = (__VA_ARGS__);                                                  \
    } while (0)
/* Makes it @n zeroed elements; returns the first, or NULL. */
void *colo_list_zeroed(colo_list_t *list, int64_t n, size_t size);

/* Removes @x from the linked list that begins at @first. @x must be in it. */
#define COLO_UNLINK(first, x)            \
    do {                                 \
        __typeof__(x) *link_ = &(first); \
        while (*link_ != (x))            \
            link_ = &(*link_)->next;     \
        *link_ = (x)->next;              \
    } while (0)

/* Orders elements whose first @n members are int64_t by the first of these that differs. */
static inline int colo_compare(const void *first, const void *second, int n)
{
    const int64_t *one = first, *other = second;
    for (int i = 0; i < n; i++)
        if (one[i] != other[i])
            return one[i] < other[i] ? -1 : 1;
    return 0;
}
static inline int colo_by_first(const void *first, const void *second)
{
    return colo_compare(first, second, 1);
}
/* Sorts @n elements of @array by @key, which must be an int64_t and their first member. */
#define COLO_SORT(array, n, key)                                                         \
    do {                                                                                 \
        _Static_assert(__builtin_types_compatible_p(__typeof__((array)->key), int64_t),  \
                       "it sorts by an int64_t");                                        \
        _Static_assert(offsetof(__typeof__(*(array)), key) == 0, "by the first member"); \
        qsort((array), (size_t)(n), sizeof *(array), colo_by_first);                     \
    } while (0)

/* Moves the variables @low and @high to the first @i of [@low, @high) where @before does not hold,
 * or to @high; it must hold for all that come before. */
#define COLO_SEARCH(low, high, i, before)                       \
    while ((low) < (high)) {                                    \
        const __typeof__(low) i = (low) + ((high) - (low)) / 2; \
        if (before)                                             \
            (low) = i + 1;                                      \
        else                                                    \
            (high) = i;                                         \
    }
/* The largest i < @n with begin[i * stride] <= @value. @n >= 1, begin[0] <= @value. */
static inline int64_t colo_last_begun(const int64_t *begin, int64_t stride, int64_t n,
                                      int64_t value)
{
    int64_t behind = 1;
    COLO_SEARCH(behind, n, i, begin[i * stride] <= value)
    return behind - 1;
}

/* Memory in chunks, the largest first. */
typedef struct colo_pool {
    struct colo_chunk *chunk;
} colo_pool_t;

/* NULL: there is no memory. */
void *colo_pool_take(colo_pool_t *pool, size_t bytes);
/* Frees all but the largest chunk of @pool and of @spare, which is that of @spare then. */
void colo_pool_recycle(colo_pool_t *pool, colo_pool_t *spare);
void colo_pool_deinit(colo_pool_t *pool);

#endif
