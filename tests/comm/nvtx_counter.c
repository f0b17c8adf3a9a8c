/* SPDX-License-Identifier: Apache-2.0 */
/* nvtx_counter.c - a tool that NVTX loads by NVTX_INJECTION64_PATH; test_ranges.c asks it. */
#include <nvtx3/nvToolsExt.h>

#include <stdatomic.h>
#include <string.h>

enum { NAMES = 64 };
static struct {
    const char *_Atomic name; /* a literal of the library */
    atomic_long times;
} seen[NAMES];
static atomic_long open_now;

long t_ranges_open(void);
long t_ranges_of(const char *name);
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get);

static int push(const char *name)
{
    atomic_fetch_add(&open_now, 1);
    for (int i = 0; i < NAMES; i++) {
        const char *none = NULL;
        if (atomic_compare_exchange_strong(&seen[i].name, &none, name) || strcmp(none, name) == 0) {
            atomic_fetch_add(&seen[i].times, 1);
            break;
        }
    }
    return 0;
}

static int pop(void)
{
    atomic_fetch_sub(&open_now, 1);
    return 0;
}

long t_ranges_open(void)
{
    return atomic_load(&open_now);
}

long t_ranges_of(const char *name)
{
    long n = 0;
    for (int i = 0; i < NAMES && seen[i].name; i++)
        n += strcmp(seen[i].name, name) == 0 ? seen[i].times : 0;
    return n;
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get)
{
    const NvtxExportTableCallbacks *t = get(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table = NULL;
    unsigned int size = 0;
    if (!t || !t->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size))
        return 0;
    *table[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
    return 1;
}
