/* SPDX-License-Identifier: Apache-2.0 */
/* library.c - see core/library.h. */
#include "core/library.h"

#include <dlfcn.h>

colo_status_t colo_library_find(const colo_library_t *l, const colo_library_symbol_t *want,
                                size_t n)
{
    void *so = RTLD_DEFAULT;
    if (!dlsym(so, want[0].name)) {
        so = dlopen(l->file, RTLD_NOW | RTLD_NOLOAD);
        so = so ? so : dlopen(l->file, RTLD_NOW | RTLD_LOCAL);
        if (!so) {
            const char *why = dlerror();
            return colo_fail(COLO_ERR_UNBUILT, "%s: %s cannot be loaded (%.300s)%s", l->user,
                             l->file, why ? why : "no reason given", l->advice);
        }
    }
    for (size_t i = 0; i < n; i++) {
        void *f = dlsym(so, want[i].name);
        COLO_FAIL_IF(!f, COLO_ERR_UNBUILT, "%s: the %s in this process has no %s%s", l->user,
                     l->title, want[i].name, l->expected);
        *(void **)want[i].function = f;
    }
    return COLO_OK;
}
