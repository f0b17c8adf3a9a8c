/* SPDX-License-Identifier: Apache-2.0 */
/* rows.c - what colo-perf prints, as nccl-tests do, and the same as JSON. */
#include "perf.h"

#include <string.h>
#include <time.h>

static int no_memory(void)
{
    return tool_problem("no memory");
}

int perf_doc(perf_t *p, const char *device, int gpus, const char *cuda, int argc, char **argv)
{
    char command[2048] = "colo-perf";
    for (int i = 1; i < argc; i++) {
        const size_t len = strlen(command);
        const bool quote = strpbrk(argv[i], " ><*?") != NULL;
        snprintf(command + len, sizeof command - len, quote ? " '%s'" : " %s", argv[i]);
    }
    char date[16] = "";
    const time_t now = time(NULL);
    struct tm day;
    if (gmtime_r(&now, &day))
        strftime(date, sizeof date, "%Y-%m-%d", &day);
    p->doc = json_pack("{s:s,s:s,s:s,s:s,s:i,s:s,s:s,s:I,s:I}", "tool", tool_name, "version",
                       colo_version(), "date", date, "device", device, "gpus", gpus, "cuda", cuda,
                       "command", command, "warmup", (json_int_t)p->warmup, "iters",
                       (json_int_t)p->iters);
    return p->doc ? TOOL_OK : tool_refuse("the command line is no UTF-8");
}

int perf_doc_add(perf_t *p, const char *list, json_t *row)
{
    json_t *all = json_object_get(p->doc, list);
    if (!all && json_object_set_new(p->doc, list, all = json_array()) != 0)
        all = NULL;
    return row && all && json_array_append_new(all, row) == 0 ? TOOL_OK : no_memory();
}

void perf_bridge_head(const perf_t *p, const perf_pair_t *pair, const char *axes)
{
    if (p->json)
        return;
    printf(
        "#\n# bridge %s -> %s, %s, %s%s, batch %lld, hidden %lld\n"
        "# algbw: size / time, busbw: what must arrive at the busiest rank / time, %%limit: push\n"
        "# or copy of the same bytes, the longer; (g): replayed in a CUDA graph, (v): a view, "
        "nothing moves\n",
        pair->src_name, pair->dst_name, axes, p->output == COLO_OUTPUT_SHARDED ? "sharded" : "full",
        p->output == COLO_OUTPUT_SHARDED ? ""
        : p->grad == COLO_GRAD_PARTIAL   ? ", partial"
                                         : ", disjoint",
        (long long)p->shape.samples, (long long)p->shape.features);
    printf("#%13s  %12s  %5s  %6s  %8s  %13s  %9s  %8s  %8s  %6s  %7s\n"
           "#%13s  %12s  %5s  %6s  %8s  %13s  %9s  %8s  %8s\n",
           "size", "count", "type", "seq", "way", "op", "time", "algbw", "busbw", "%limit",
           "#wrong", "(B)", "(elements)", "", "", "", "", "(us)", "(GB/s)", "(GB/s)");
}

int perf_bridge_row(perf_t *p, const perf_row_t *r)
{
    const double alg = r->us > 0 ? (double)r->bytes / r->us * 1e-3 : 0,
                 bus = r->us > 0 ? (double)r->arrive / r->us * 1e-3 : 0,
                 percent = r->us > 0 && !r->view ? 100 * r->limit / r->us : 0;
    p->wrong += r->wrong;
    if (!p->json) {
        char op[24];
        snprintf(op, sizeof op, "%s%s", r->op, r->view ? "(v)" : r->replayed ? "(g)" : "");
        printf("%14lld  %12lld  %5s  %6lld  %8s  %13s  %9.2f  %8.1f  %8.1f  %6.1f  %7lld\n",
               (long long)r->bytes, (long long)(r->bytes / (int64_t)colo_dtype_size(p->dtype)),
               colo_dtype_name(p->dtype), (long long)r->shape.rows, r->pass, op, r->us, alg, bus,
               percent, r->wrong);
        fflush(stdout);
    }
    return perf_doc_add(
        p, "bridge",
        json_pack("{s:s,s:s,s:s,s:s,s:s,s:s,s:I,s:I,s:I,s:s,s:s,s:b,s:b,s:I,s:I,s:I,s:f,s:f,s:f,"
                  "s:f,s:f,s:f,s:I}",
                  "src", r->pair->src_name, "dst", r->pair->dst_name, "axes", r->axes, "dtype",
                  colo_dtype_name(p->dtype), "output",
                  p->output == COLO_OUTPUT_SHARDED ? "sharded" : "full", "grad",
                  p->grad == COLO_GRAD_PARTIAL ? "partial" : "disjoint", "batch",
                  (json_int_t)r->shape.samples, "seq", (json_int_t)r->shape.rows, "hidden",
                  (json_int_t)r->shape.features, "way", r->pass, "op", r->op, "replayed",
                  r->replayed, "view", r->view, "bytes", (json_int_t)r->bytes, "arrive_bytes",
                  (json_int_t)r->arrive, "local_bytes", (json_int_t)r->local, "time_us", r->us,
                  "best_us", r->best, "limit_us", r->limit, "algbw_gbs", alg, "busbw_gbs", bus,
                  "percent", percent, "wrong", (json_int_t)r->wrong));
}

int perf_doc_finish(perf_t *p)
{
    int rc = TOOL_OK;
    if (p->json) {
        if (json_dumpf(p->doc, stdout, JSON_INDENT(2)) != 0)
            rc = tool_problem("nowhere to write the JSON");
        printf("\n");
    }
    if (rc == TOOL_OK && p->svg)
        rc = perf_plot(p->doc, p->svg);
    return rc;
}
