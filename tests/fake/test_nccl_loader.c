/* SPDX-License-Identifier: Apache-2.0 */
/* test_nccl_loader.c - which versions of NCCL are taken, and what is said of others. */
#include "harness/harness.h"

#include <colobridge/nccl.h>

static colo_status_t create_with(const char *version)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *self = NULL, *comm = NULL;
    setenv("FAKE_NCCL_VERSION", version, 1);
    assert_ok(colo_comm_create_self(&self));
    const colo_status_t st = colo_comm_create_nccl(self, 0, &comm);
    return st;
}

T_CASE(nccl_of_another_version_is_refused_and_2_18_serves)
{
    static const char *const others[] = {"21799", "2903", "30000"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        assert_fails(create_with(others[i]), COLO_ERR_UNBUILT,
                     "expected 2.18 (21800) or a later 2.x");
        assert_non_null(strstr(colo_last_error(), others[i]));
    }
    assert_ok(create_with("21800"));
}

T_MAIN("fake/nccl_loader")
