/* SPDX-License-Identifier: Apache-2.0 */
/* held.c - see held.h. */
#include "harness/held.h"

#include "core/error.h"

#include <dirent.h>
#include <malloc.h>
#include <unistd.h>

/* mallinfo2() sees one arena, so all threads shall have that one. */
__attribute__((constructor)) static void have_one_arena(void)
{
    mallopt(M_ARENA_MAX, 1);
}

static int64_t entries(const char *folder)
{
    int64_t n = 0;
    DIR *dir = opendir(folder);
    while (dir && readdir(dir))
        n++;
    if (dir)
        closedir(dir);
    return n;
}

static struct t_held_amounts amounts(const t_held_t *h)
{
    const struct mallinfo2 m = mallinfo2();
    return (struct t_held_amounts){entries("/proc/self/fd"), entries("/proc/self/task"),
                                   (int64_t)(m.uordblks + m.hblkhd),
                                   h->device_bytes ? h->device_bytes() : 0};
}

static bool has_grown(const t_held_t *h, const struct t_held_amounts *now)
{
    const struct t_held_amounts *first = &h->first;
    return now->descriptors > first->descriptors || now->threads > first->threads ||
           now->heap - first->heap > h->heap_slack ||
           now->device - first->device > h->device_slack;
}

/* What an abort left to threads of NCCL has a second to end. */
colo_status_t t_held_compare(t_held_t *h, int64_t worlds)
{
    const struct t_held_amounts *first = &h->first;
    struct t_held_amounts now = amounts(h);
    if (worlds <= T_HELD_WARM)
        h->first = now;
    for (int i = 0; i < 100 && has_grown(h, &now); i++) {
        usleep(10000);
        now = amounts(h);
    }
    if (!has_grown(h, &now))
        return COLO_OK;
    return colo_fail(COLO_ERR_STATE,
                     "leak: after %lld worlds %lld descriptors, %lld threads, %lld bytes of heap, "
                     "%lld of devices; after %d worlds %lld, %lld, %lld, %lld",
                     (long long)worlds, (long long)now.descriptors, (long long)now.threads,
                     (long long)now.heap, (long long)now.device, (int)T_HELD_WARM,
                     (long long)first->descriptors, (long long)first->threads,
                     (long long)first->heap, (long long)first->device);
}
