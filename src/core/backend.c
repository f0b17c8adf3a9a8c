/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend.c - loads backend libraries on first use and refuses those that were built for another
 * libcolobridge.
 *
 * Where: COLO_BACKEND_DIR, else the folder of the file that this code is in (libcolobridge.so, or
 * the program it was linked into). A backend is never unloaded: comms and tables point into it.
 * What a backend offers is its own business; that this build lacks one is a status with a way out,
 * never a link error.
 */
#include "core/backend.h"

#include "core/env.h"
#include "core/error.h"
#include "core/lock.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 8, NAME_MAX_ = 16 };

static struct {
    char name[NAME_MAX_ + 1];
    const colo_backend_t *_Atomic backend;
} loaded[MOST]; /* filled from the front, under the lock; the backend last */
COLO_LOCK(lock);

static bool name_ok(const char *name)
{
    size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789");
    return n >= 1 && n <= NAME_MAX_ && !name[n];
}

/* In its folder, or without one when the loader's own search must do. Never cut: another file may
 * have the shorter name. */
static colo_status_t find_path(const char *name, char *path, size_t cap)
{
    const char *dir = NULL, *end = NULL;
    Dl_info here;
    COLO_TRY(colo_env_text("COLO_BACKEND_DIR", &dir));
    if (dir[0])
        end = dir + strlen(dir);
    else if (dladdr(loaded, &here) && here.dli_fname && (end = strrchr(here.dli_fname, '/')))
        dir = here.dli_fname;
    int n = snprintf(path, cap, "%.*s%slibcolobridge-%s.so", end ? (int)(end - dir) : 0, dir,
                     end ? "/" : "", name);
    COLO_FAIL_IF(n < 0 || (size_t)n >= cap, COLO_ERR_UNBUILT,
                 "backend '%s': its path has %d bytes, expected at most %zu; install the library "
                 "in another folder",
                 name, n, cap - 1);
    return COLO_OK;
}

static colo_status_t vet(const char *name, const char *path, const colo_backend_t *backend)
{
    COLO_FAIL_IF(backend->abi != COLO_BACKEND_ABI, COLO_ERR_UNBUILT,
                 "backend '%s': %s has interface %u, this library %s has %u; install both from the "
                 "same build",
                 name, path, (unsigned)backend->abi, colo_version(), COLO_BACKEND_ABI);
    COLO_FAIL_IF(backend->version != colo_version_number(), COLO_ERR_UNBUILT,
                 "backend '%s': %s was built for version %u.%u.%u, this library is %s; install "
                 "both from the same build",
                 name, path, (unsigned)(backend->version >> 16),
                 (unsigned)(backend->version >> 8 & 0xff), (unsigned)(backend->version & 0xff),
                 colo_version());
    COLO_FAIL_IF(!backend->name || strcmp(backend->name, name) != 0, COLO_ERR_UNBUILT,
                 "backend '%s': %s says it is '%.16s'; the file has been renamed, install it again",
                 name, path, backend->name ? backend->name : "");
    if (backend->fail != colo_fail) {
        Dl_info its, ours;
        const bool known = dladdr((const void *)(uintptr_t)backend->fail, &its) && its.dli_fname;
        const bool here = dladdr(loaded, &ours) && ours.dli_fname;
        return colo_fail(COLO_ERR_UNBUILT,
                         "backend '%s': %s calls the copy of this library in %s, expected the one "
                         "in %s; load one copy of libcolobridge per process",
                         name, path, known ? its.dli_fname : "an unknown file",
                         here ? ours.dli_fname : "this program");
    }
    return COLO_OK;
}

/* Did the dynamic linker miss a function of this library? Then the file is of another version. */
static bool is_other_version(const char *why)
{
    return strstr(why, "undefined symbol: colo_") || strstr(why, "version `COLOBRIDGE_");
}

static colo_status_t open_backend(const char *name, const colo_backend_t **backend)
{
    char path[PATH_MAX];
    COLO_TRY(find_path(name, path, sizeof path));
    /* A link to a backend finds libcolobridge.so next to the file, not next to the link. */
    COLO_AUTOFREE char *file = realpath(path, NULL);
    void *so = dlopen(file ? file : path, RTLD_NOW | RTLD_LOCAL);
    if (!so) {
        const char *why = dlerror();
        COLO_FAIL_IF(why && is_other_version(why), COLO_ERR_UNBUILT,
                     "backend '%s': %s was built for another version than this library %s "
                     "(%.400s); install both from the same build",
                     name, path, colo_version(), why);
        return colo_fail(COLO_ERR_UNBUILT,
                         "backend '%s' could not be loaded (%.400s); build it with -D%s=enabled, "
                         "or set COLO_BACKEND_DIR to the folder of libcolobridge-%s.so",
                         name, why ? why : path, name, name);
    }
    const colo_backend_t *found = dlsym(so, COLO_BACKEND_SYMBOL);
    colo_status_t st =
        found
            ? vet(name, path, found)
            : colo_fail(COLO_ERR_UNBUILT,
                        "backend '%s': %s has no symbol '" COLO_BACKEND_SYMBOL
                        "'; it is not a backend of this library, remove it or set COLO_BACKEND_DIR",
                        name, path);
    if (st < 0) {
        dlclose(so);
        return st;
    }
    *backend = found;
    return COLO_OK;
}

/* Where @name is, or would be put; MOST: nowhere. */
static int find(const char *name)
{
    int i = 0;
    while (i < MOST && atomic_load(&loaded[i].backend) && strcmp(loaded[i].name, name) != 0)
        i++;
    return i;
}

colo_status_t colo_backend_load(const char *name, const colo_backend_t **backend)
{
    COLO_FAIL_IF(!name || !name_ok(name), COLO_ERR_ARG,
                 "backend '%.40s': expected 1..%d of [a-z0-9]", name ? name : "(NULL)", NAME_MAX_);
    const colo_backend_t *found = NULL;
    int i = find(name);
    if (i < MOST && (found = atomic_load(&loaded[i].backend))) { /* what hot calls come to */
        *backend = found;
        return COLO_OK;
    }
    COLO_HOLD(&lock);
    i = find(name);
    COLO_FAIL_IF(i == MOST, COLO_ERR_UNBUILT, "backend '%s': %d backends are loaded, no more fit",
                 name, MOST);
    if (!(found = atomic_load(&loaded[i].backend))) {
        COLO_TRY(open_backend(name, &found));
        snprintf(loaded[i].name, sizeof loaded[i].name, "%s", name);
        atomic_store(&loaded[i].backend, found);
    }
    *backend = found;
    return COLO_OK;
}

colo_status_t colo_device_for(colo_mem_t mem, const colo_device_t **device)
{
    switch (mem) {
    case COLO_MEM_HOST:
        *device = &colo_device_host;
        return COLO_OK;
    case COLO_MEM_CUDA: {
        const colo_backend_t *backend;
        COLO_TRY(colo_backend_load("cuda", &backend));
        COLO_FAIL_IF(!backend->device, COLO_ERR_UNBUILT, "backend 'cuda' offers no element passes");
        *device = backend->device;
        return COLO_OK;
    }
    }
    return colo_fail(COLO_ERR_ARG, "memory kind %d is unknown", (int)mem);
}
