/* SPDX-License-Identifier: Apache-2.0 */
/* library.c - see core/library.h. */
#include "core/library.h"

#include <dlfcn.h>

colo_status_t colo_library_find(const colo_library_t *library, const colo_library_symbol_t *want,
                                size_t n)
{
    void *so = RTLD_DEFAULT;
    if (!dlsym(so, want[0].name)) {
        so = dlopen(library->file, RTLD_NOW | RTLD_NOLOAD);
        so = so ? so : dlopen(library->file, RTLD_NOW | RTLD_LOCAL);
        if (!so) {
            const char *why = dlerror();
            return colo_fail(COLO_ERR_UNBUILT, "%s: %s cannot be loaded (%.300s)%s", library->user,
                             library->file, why ? why : "no reason given", library->advice);
        }
    }
    for (size_t i = 0; i < n; i++) {
        void *f = dlsym(so, want[i].name);
        COLO_FAIL_IF(!f, COLO_ERR_UNBUILT, "%s: the %s in this process has no %s%s", library->user,
                     library->title, want[i].name, library->expected);
        *(void **)want[i].function = f;
    }
    return COLO_OK;
}
