/* SPDX-License-Identifier: Apache-2.0 */
/* drill_ipc.c - a rank that fails when others have its memory open. See faults/drill.h. */
#include "processes.h"

#include "faults/drill.h"

colo_status_t be_processes(struct rank *r)
{
    return fake_be_processes(r->world, colo_comm_control(r->world), CULPRIT + 1);
}

/* What follows the opening: of registered memory its row of a table, of mailboxes a bridge's lists.
 */
void fail_while_open(struct rank *r)
{
    fake_fail_name(colo_direct_of(r->world)->device,
                   strcmp(step, "register") == 0 ? "cudaMemcpy2DAsync" : "cudaMemcpyAsync");
}

bool freed_while_open(void)
{
    return fake_misuse() > 0;
}
