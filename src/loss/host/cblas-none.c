/* SPDX-License-Identifier: Apache-2.0 */
/* cblas-none.c - stands in for cblas.c where no CBLAS is to be looked for (-Dcblas=disabled).
 */
#include "loss/host/cblas.h"

#include "core/env.h"
#include "core/error.h"

#include <stdio.h>
#include <string.h>

colo_status_t colo_cblas_find(colo_gemm_t gemm, colo_cblas_t *lib, bool *found,
                              char why[COLO_CBLAS_WHY])
{
    const char *asked;
    bool from_env;
    *found = false;
    snprintf(why, COLO_CBLAS_WHY, "loops: this library was built with -Dcblas=disabled");
    COLO_TRY(colo_env_text("COLO_GEMM", &asked));
    (void)colo_env_value("COLO_GEMM", &from_env);
    if (from_env ? strcmp(asked, "auto") == 0 || strcmp(asked, "loops") == 0
                 : gemm != COLO_GEMM_CBLAS)
        return COLO_OK;
    COLO_FAIL_IF(!from_env, COLO_ERR_UNBUILT,
                 "lm_head: config.gemm is COLO_GEMM_CBLAS, but this library was built with "
                 "-Dcblas=disabled; build with -Dcblas=enabled");
    return colo_fail(COLO_ERR_UNBUILT,
                     "lm_head: COLO_GEMM is '%.40s', but this library was built with "
                     "-Dcblas=disabled; unset it, or build with -Dcblas=enabled",
                     asked);
}
