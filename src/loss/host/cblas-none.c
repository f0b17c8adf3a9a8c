/* SPDX-License-Identifier: Apache-2.0 */
/* cblas-none.c - stands in for cblas.c where no CBLAS is to be looked for (-Dcblas=disabled).
 */
#include "loss/host/cblas.h"

#include "core/env.h"
#include "core/error.h"

#include <string.h>

colo_status_t colo_cblas_find(colo_cblas_t *lib, bool *found)
{
    const char *asked;
    *found = false;
    COLO_TRY(colo_env_text("COLO_GEMM", &asked));
    if (strcmp(asked, "auto") == 0 || strcmp(asked, "loops") == 0)
        return COLO_OK;
    return colo_fail(COLO_ERR_UNBUILT,
                     "lm_head: COLO_GEMM is '%.40s', but this library was built with "
                     "-Dcblas=disabled; unset it, or build with -Dcblas=enabled",
                     asked);
}
