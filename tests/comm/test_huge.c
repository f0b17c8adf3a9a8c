/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_huge.c - one message of more bytes, and more elements, than an int can count.
 *
 * Every eight bytes hold their own position, so a piece that is lost, doubled, or put 2^31 or 2^32
 * bytes off is seen. It takes twice the message in memory and is skipped where that is not free.
 */
#include "harness/harness.h"
#include "harness/ranks.h"

#include "core/error.h"

#include <limits.h>

#define BYTES ((int64_t)INT_MAX + 1 + 8 * 1001) /* the last piece is no full one */

static uint64_t word(int64_t i)
{
    return (uint64_t)i * 0x9e3779b97f4a7c15u; /* odd: no two are alike */
}

T_CASE_ON(2, a_message_beyond_two_gibibytes_arrives_whole)
{
    int32_t me = colo_comm_rank(world);
    uint64_t *x = me == 0 ? malloc(BYTES) : calloc(1, BYTES);
    if (!x)
        return colo_fail(COLO_ERR_NOMEM, "no memory for %lld bytes", (long long)BYTES);
    for (int64_t i = 0; i < BYTES / 8 && me == 0; i++)
        x[i] = word(i);
    colo_box_t box = {x, {1, 1, BYTES}, {0, 0, 1}};
    colo_message_t m = {1 - me, 1, &box};
    rank_try(colo_comm_exchange(world, &m, me == 0, &m, me == 1, COLO_U8, NULL));
    int64_t wrong = -1;
    for (int64_t i = 0; i < BYTES / 8 && wrong < 0; i++)
        if (x[i] != word(i))
            wrong = i;
    free(x);
    if (wrong >= 0)
        return colo_fail(COLO_ERR_STATE, "byte %lld of %lld is not what was sent",
                         (long long)(8 * wrong), (long long)BYTES);
    return COLO_OK;
}

/* Bytes that may be taken, by the system and by the control group; -1 when neither says. */
static int64_t free_bytes(void)
{
    char line[256];
    long long kib, most, used;
    int64_t bytes = -1;
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %lld kB", &kib) == 1)
            bytes = kib * 1024;
    if (f)
        fclose(f);
    FILE *max = fopen("/sys/fs/cgroup/memory.max", "r");
    FILE *now = fopen("/sys/fs/cgroup/memory.current", "r");
    if (max && now && fscanf(max, "%lld", &most) == 1 && fscanf(now, "%lld", &used) == 1 &&
        (bytes < 0 || most - used < bytes))
        bytes = most - used;
    if (max)
        fclose(max);
    if (now)
        fclose(now);
    return bytes;
}

int main(void)
{
    int64_t need = 2 * BYTES + (1 << 30), have = free_bytes();
    if (have >= 0 && have < need) {
        printf("skipped: %lld MiB of memory are free, %lld are wanted\n", (long long)(have >> 20),
               (long long)(need >> 20));
        return T_EXIT_SKIP;
    }
    return t_main("comm/huge");
}
