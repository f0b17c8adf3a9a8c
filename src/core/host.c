/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host.c - where this process runs, from the kernel's boot id, the host's name and the network
 * namespace. The boot id is read once: ranks may be thousands of threads.
 */
#include "core/host.h"

#include "core/hash.h"
#include "core/lock.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

COLO_LOCK(lock);
static bool is_read;
static char boot[64]; /* empty: there is none here */

int colo_host_shortage(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS ? error : 0;
}

static int read_boot(void)
{
    int error = 0;
    COLO_HOLD(&lock);
    if (!is_read) {
        FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
        error = f ? 0 : colo_host_shortage(errno);
        if (f && !fgets(boot, sizeof boot, f))
            boot[0] = '\0';
        if (f)
            fclose(f);
        is_read = error == 0;
    }
    return error;
}

static const char *host_name(char name[128])
{
    memset(name, 0, 128);
    if (gethostname(name, 127) != 0)
        name[0] = '\0';
    return name;
}

uint64_t colo_host_machine(void)
{
    char name[128];
    (void)read_boot();
    return colo_hash_str(COLO_HASH_INIT, boot[0] ? boot : host_name(name));
}

uint64_t colo_host_node(void)
{
    char name[128];
    (void)read_boot();
    return colo_hash_str(colo_hash_str(COLO_HASH_INIT, boot), host_name(name));
}

int colo_host_sockets(uint64_t *id)
{
    struct stat net;
    const int error = read_boot();
    *id = 0;
    if (!error && boot[0] && stat("/proc/self/ns/net", &net) == 0)
        *id = colo_hash_i64(colo_hash_str(COLO_HASH_INIT, boot), (int64_t)net.st_ino);
    return error;
}
