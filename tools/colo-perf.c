/* SPDX-License-Identifier: Apache-2.0 */
/*
 * colo-perf.c - how fast this machine is, and how fast the library is on it, in one run.
 *
 * Flags and columns are those of nccl-tests. Every figure stands beside the limit that was measured
 * a moment before on the same device, and every result is checked in the run: a #wrong that is not
 * 0 is exit status 1. What is measured is in perf-link.c and perf-logprob.c; this file reads the
 * command line and keeps time.
 */
#include "perf.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: colo-perf link|logprob [options]\n"
    "\n"
    "  link       memory of one GPU: cudaMemcpyAsync, a plain copy kernel, the bridge's local "
    "copy,\n"
    "             and a kernel that only reads, by size\n"
    "  logprob    loss on logits, forward and backward, against the read and copy bandwidth of "
    "the\n"
    "             same run\n"
    "\n"
    "  -b BYTES   smallest size (1M); K, M and G are powers of 1024\n"
    "  -e BYTES   largest size (1G)\n"
    "  -f N       factor from size to size (4)\n"
    "  -g N       GPUs (1: this version measures no more)\n"
    "  -w N       launches that do not count (5)\n"
    "  -n N       launches that count (20); the median is printed\n"
    "  --tokens N, --vocab N    logprob: rows and columns of the logits (8192, 151936), bf16\n"
    "  --entropy  logprob: with entropy and its gradient\n"
    "  --json     keys: tool, version, device, cuda, command, link [{op, bytes, time_us, "
    "algbw_gbs,\n"
    "             membw_gbs, wrong}] or logprob {tokens, vocab, dtype, entropy, rows [{op,\n"
    "              bytes, time_us, best_us, gbs, percent, of, wrong}]}; GB is 10^9 bytes\n"
    "  --version, --help\n"
    "\n"
    "Example: colo-perf logprob -n 50\n"
    "Exit: 0 ok, 1 a wrong result or no GPU, 2 wrong use.\n";

enum {
    BEGIN,
    END,
    FACTOR,
    GPUS,
    WARMUP,
    ITERS,
    TOKENS,
    VOCAB,
    ENTROPY,
    JSON,
    VERSION,
    HELP,
    COUNT
};

/* "8", "64K", "1M", "2G" */
static int size_of(const tool_option_t *o, int64_t *bytes)
{
    char q[TOOL_QUOTE_MAX], *end;
    if (!o->given)
        return TOOL_OK;
    errno = 0;
    long long v = strtoll(o->value, &end, 10);
    static const char units[] = "KMG";
    const char *unit = *end ? strchr(units, *end) : NULL;
    const int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    bool ok = o->value[0] >= '0' && o->value[0] <= '9' && !errno && (!*end || (unit && !end[1]));
    if (!ok || v < 16 >> (shift < 4 ? shift : 4) || v > INT64_C(1) << 40 >> shift)
        return tool_complain(TOOL_WRONG_USE, PERF_TOOL,
                             "%s: %s is no size from 16 bytes to 1024G (8M, 64K)", o->name,
                             tool_quote(q, o->value));
    *bytes = (int64_t)v << shift;
    return TOOL_OK;
}

static int ascending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

int perf_time(const perf_t *p, perf_fn fn, void *arg, double *median, double *best)
{
    const size_t n = (size_t)p->iters;
    cudaEvent_t *at = calloc(n + 1, sizeof(cudaEvent_t));
    float *ms = calloc(n, sizeof *ms);
    int rc = at && ms ? TOOL_OK : tool_complain(TOOL_PROBLEM, PERF_TOOL, "no memory");
    for (size_t i = 0; rc == TOOL_OK && i <= n; i++)
        if (cudaEventCreate(&at[i]) != cudaSuccess)
            rc = tool_complain(TOOL_PROBLEM, PERF_TOOL, "no event could be made");
    for (int64_t i = 0; rc == TOOL_OK && i < p->warmup; i++)
        rc = fn(arg, NULL);
    if (rc == TOOL_OK)
        cudaEventRecord(at[0], NULL);
    for (size_t i = 0; rc == TOOL_OK && i < n; i++) {
        rc = fn(arg, NULL);
        cudaEventRecord(at[i + 1], NULL);
    }
    cudaError_t e = cudaDeviceSynchronize();
    for (size_t i = 0; rc == TOOL_OK && e == cudaSuccess && i < n; i++)
        e = cudaEventElapsedTime(&ms[i], at[i], at[i + 1]);
    if (rc == TOOL_OK && e != cudaSuccess)
        rc = tool_complain(TOOL_PROBLEM, PERF_TOOL, "timing: %s", cudaGetErrorString(e));
    if (rc == TOOL_OK) {
        qsort(ms, n, sizeof *ms, ascending);
        *median = 1e3 * (n % 2 ? ms[n / 2] : 0.5 * (ms[n / 2 - 1] + ms[n / 2]));
        if (best)
            *best = 1e3 * ms[0];
    }
    for (size_t i = 0; at && i <= n; i++)
        if (at[i])
            cudaEventDestroy(at[i]);
    free(at);
    free(ms);
    return rc;
}

static int describe(perf_t *p, int argc, char **argv)
{
    struct cudaDeviceProp prop;
    int driver = 0, runtime = 0, n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n < 1)
        return tool_complain(TOOL_PROBLEM, PERF_TOOL, "no CUDA device: %s",
                             e == cudaSuccess ? "none found" : cudaGetErrorString(e));
    PERF_CUDA(cudaGetDeviceProperties(&prop, 0));
    PERF_CUDA(cudaDriverGetVersion(&driver));
    PERF_CUDA(cudaRuntimeGetVersion(&runtime));
    if (!p->json) {
        printf("# colobridge %s, %s, CUDA driver %d.%d, runtime %d.%d\n", colo_version(), prop.name,
               driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
        printf("# warmup %lld, iters %lld, medians; GB is 10^9 bytes\n#\n", (long long)p->warmup,
               (long long)p->iters);
        return TOOL_OK;
    }
    char command[1024] = PERF_TOOL, cuda[32];
    for (int i = 1; i < argc; i++) {
        size_t len = strlen(command);
        snprintf(command + len, sizeof command - len, " %s", argv[i]);
    }
    snprintf(cuda, sizeof cuda, "%d.%d", runtime / 1000, runtime % 1000 / 10);
    p->doc = json_pack("{s:s,s:s,s:s,s:s,s:s}", "tool", PERF_TOOL, "version", colo_version(),
                       "device", prop.name, "cuda", cuda, "command", command);
    return p->doc ? TOOL_OK : tool_complain(TOOL_PROBLEM, PERF_TOOL, "the command is no UTF-8");
}

static int read_options(perf_t *p, tool_option_t *o)
{
    const struct {
        int at;
        int64_t lo, hi, *value;
    } numbers[] = {
        {FACTOR, 2, 1 << 20, &p->factor},          {GPUS, 1, 1024, &p->gpus},
        {WARMUP, 0, 1000000, &p->warmup},          {ITERS, 1, 1000000, &p->iters},
        {TOKENS, 1, INT64_C(1) << 30, &p->tokens}, {VOCAB, 2, INT64_C(1) << 30, &p->vocab}};
    int rc = size_of(&o[BEGIN], &p->begin);
    rc = rc ? rc : size_of(&o[END], &p->end);
    for (size_t i = 0; rc == TOOL_OK && i < sizeof numbers / sizeof numbers[0]; i++)
        rc = tool_i64(PERF_TOOL, &o[numbers[i].at], numbers[i].lo, numbers[i].hi, numbers[i].value);
    p->entropy = o[ENTROPY].given;
    p->json = o[JSON].given;
    if (rc == TOOL_OK && p->begin > p->end)
        rc = tool_complain(TOOL_WRONG_USE, PERF_TOOL, "-b %lld is larger than -e %lld",
                           (long long)p->begin, (long long)p->end);
    if (rc == TOOL_OK && p->gpus > 1)
        rc = tool_complain(TOOL_WRONG_USE, PERF_TOOL, "-g %lld: this version measures one GPU",
                           (long long)p->gpus);
    return rc;
}

int main(int argc, char **argv)
{
    tool_option_t o[COUNT] = {
        [BEGIN] = {.name = "-b"},
        [END] = {.name = "-e"},
        [FACTOR] = {.name = "-f"},
        [GPUS] = {.name = "-g"},
        [WARMUP] = {.name = "-w"},
        [ITERS] = {.name = "-n"},
        [TOKENS] = {.name = "--tokens"},
        [VOCAB] = {.name = "--vocab"},
        [ENTROPY] = {.name = "--entropy", .flag = true},
        [JSON] = {.name = "--json", .flag = true},
        [VERSION] = {.name = "--version", .flag = true},
        [HELP] = {.name = "--help", .flag = true},
    };
    perf_t p = {.begin = 1 << 20,
                .end = 1 << 30,
                .factor = 4,
                .gpus = 1,
                .warmup = 5,
                .iters = 20,
                .tokens = 8192,
                .vocab = 151936};
    const char *what = argc > 1 && argv[1][0] != '-' ? argv[1] : NULL;
    const int skip = what ? 1 : 0;
    char q[TOOL_QUOTE_MAX];
    int rc = tool_parse(PERF_TOOL, o, COUNT, argc - skip, argv + skip);
    if (rc != TOOL_OK)
        return rc;
    if (o[HELP].given || o[VERSION].given) {
        if (o[HELP].given)
            fputs(help, stdout);
        else
            printf("%s %s\n", PERF_TOOL, colo_version());
        return tool_finish(TOOL_OK, PERF_TOOL);
    }
    if (!what || (strcmp(what, "link") != 0 && strcmp(what, "logprob") != 0))
        return tool_complain(TOOL_WRONG_USE, PERF_TOOL,
                             "%s is no subcommand: link, logprob; see --help",
                             what ? tool_quote(q, what) : "nothing");
    rc = read_options(&p, o);
    rc = rc ? rc : describe(&p, argc, argv);
    rc = rc ? rc : what[1] == 'i' ? perf_link(&p) : perf_logprob(&p);
    if (p.doc) {
        if (rc == TOOL_OK && json_dumpf(p.doc, stdout, JSON_INDENT(2)) != 0)
            rc = tool_complain(TOOL_PROBLEM, PERF_TOOL, "nowhere to write the JSON");
        printf("\n");
        json_decref(p.doc);
    }
    if (rc == TOOL_OK && p.wrong)
        rc = tool_complain(TOOL_PROBLEM, PERF_TOOL, "%lld results are wrong", p.wrong);
    return tool_finish(rc, PERF_TOOL);
}
