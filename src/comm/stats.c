/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stats.c - what a comm did: counters for tests, records of the last operations for the day
 * after a fault, both as JSON.
 *
 * The comm's thread writes under the lock, twice an operation; dump and statistics read under it,
 * from any thread, also while an operation hangs. Counters count operations that ended well; the
 * record buffer shows the others, too, with their status.
 */
#include "comm/comm.h"
#include "core/error.h"
#include "core/sized.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

const char *colo_op_name(colo_op_kind_t kind)
{
    static const char *const names[COLO_OP_COUNT] = {
        [COLO_OP_ALL_GATHER] = "all_gather",
        [COLO_OP_ALL_REDUCE] = "all_reduce",
        [COLO_OP_REDUCE_SCATTER] = "reduce_scatter",
        [COLO_OP_BROADCAST] = "broadcast",
        [COLO_OP_BARRIER] = "barrier",
        [COLO_OP_EXCHANGE] = "exchange",
        [COLO_OP_SPLIT] = "split",
    };
    return (unsigned)kind < COLO_OP_COUNT ? names[kind] : "?";
}

const char *colo_category_name(colo_category_t category)
{
    static const char *const names[COLO_CATEGORY_COUNT] = {
        [COLO_CATEGORY_USER] = "user",   [COLO_CATEGORY_BRIDGE] = "bridge",
        [COLO_CATEGORY_LOSS] = "loss",   [COLO_CATEGORY_HEAD] = "head",
        [COLO_CATEGORY_CHECK] = "check",
    };
    return (unsigned)category < COLO_CATEGORY_COUNT ? names[category] : "?";
}

const char *colo_op_describe(char *text, size_t cap, colo_op_desc_t op, uint64_t seq)
{
    char number[24] = "", detail[64] = "";
    if (seq)
        snprintf(number, sizeof number, " #%llu", (unsigned long long)seq);
    switch (op.kind) {
    case COLO_OP_ALL_REDUCE:
    case COLO_OP_REDUCE_SCATTER:
        snprintf(detail, sizeof detail, " (%s of %lld %s)",
                 op.param == COLO_REDOP_MAX ? "max" : "sum", (long long)op.count,
                 colo_dtype_name(op.dtype));
        break;
    case COLO_OP_BROADCAST:
        snprintf(detail, sizeof detail, " (%lld %s from rank %d)", (long long)op.count,
                 colo_dtype_name(op.dtype), (int)op.param);
        break;
    case COLO_OP_ALL_GATHER:
        snprintf(detail, sizeof detail, " (%lld %s%s)", (long long)op.count,
                 colo_dtype_name(op.dtype),
                 op.param ? ", comparing what ranks are about to do" : "");
        break;
    case COLO_OP_EXCHANGE:
        if (op.param)
            snprintf(detail, sizeof detail, " (bridge %u %s%s, %s)",
                     (uint32_t)op.param % COLO_OP_ALONE / 2, op.param & 1 ? "backward" : "forward",
                     (uint32_t)op.param & COLO_OP_ALONE ? " without backward" : "",
                     colo_dtype_name(op.dtype));
        else
            snprintf(detail, sizeof detail, " (%s)", colo_dtype_name(op.dtype));
        break;
    case COLO_OP_BARRIER:
    case COLO_OP_SPLIT:
    case COLO_OP_COUNT:
        break;
    }
    snprintf(text, cap, "%s%s%s", colo_op_name(op.kind), number, detail);
    return text;
}

const char *colo_op_found(char *text, size_t cap, colo_op_desc_t mine, colo_op_desc_t theirs,
                          uint64_t seq)
{
    char what[96];
    const bool same = colo_op_pack(&mine) == colo_op_pack(&theirs); /* but for the count */
    snprintf(text, cap, "is in %s%s", colo_op_describe(what, sizeof what, theirs, seq),
             same && mine.kind == COLO_OP_EXCHANGE
                 ? " with another plan: one of the two took another shape or position table"
             : same && mine.category == COLO_CATEGORY_LOSS
                 ? ": in a loss they have other numbers of tokens, or ask for other outputs"
                 : "");
    return text;
}

bool colo_comm_is_own(const colo_comm_t *comm, const char *what)
{
    const int32_t here = (int32_t)getpid();
    if (here == comm->process)
        return true;
    colo_fail(COLO_ERR_STATE,
              "%s: comm '%s' belongs to process %d, and process %d is a child with a copy of it; "
              "use it in process %d only, or make a communicator in the child",
              what, comm->name, (int)comm->process, (int)here, (int)comm->process);
    return false;
}

uintptr_t colo_comm_thread(void)
{
    static _Thread_local char here;
    return (uintptr_t)&here;
}

uint64_t colo_comm_begin(colo_comm_t *comm, colo_op_desc_t op, int64_t sent_bytes,
                         int64_t recv_bytes, int32_t peers)
{
    if (comm->size == 1)
        sent_bytes = recv_bytes = 0;
    COLO_HOLD(comm->lock);
    uint64_t seq = ++comm->seq;
    comm->op = op;
    comm->thread = colo_comm_thread();
    comm->record[seq % COLO_RECORDS] = (colo_record_t){
        .seq = seq,
        .kind = op.kind,
        .category = op.category,
        .dtype = op.dtype,
        .count = op.count,
        .sent_bytes = sent_bytes,
        .recv_bytes = recv_bytes,
        .peers = peers,
        .ticket = comm->ticket,
        .status = COLO_PENDING,
        .begin = colo_now(),
    };
    return seq;
}

uint64_t colo_comm_begin_collective(colo_comm_t *comm, colo_op_desc_t op)
{
    const int64_t bytes = op.count * (int64_t)colo_dtype_size(op.dtype), n = comm->size;
    int64_t sent = 0, received = 0;
    if (op.kind == COLO_OP_BROADCAST) {
        *(op.param == comm->rank ? &sent : &received) = bytes;
    } else if (op.kind == COLO_OP_ALL_REDUCE) {
        sent = received = bytes * 2 * (n - 1) / n;
    } else if (op.kind != COLO_OP_BARRIER) {
        received = (n - 1) * bytes;
        sent = op.kind == COLO_OP_REDUCE_SCATTER ? received : bytes;
    }
    return colo_comm_begin(comm, op, sent, received, comm->size - 1);
}

void colo_comm_end(colo_comm_t *comm, uint64_t seq, colo_status_t status)
{
    COLO_HOLD(comm->lock);
    colo_record_t *record = &comm->record[seq % COLO_RECORDS];
    record->status = status;
    record->end = colo_now();
    comm->thread = 0;
    if (status == COLO_OK) {
        comm->stats.ops[record->kind][record->category]++;
        comm->stats.sent_bytes[record->kind][record->category] += (uint64_t)record->sent_bytes;
        comm->stats.recv_bytes[record->kind][record->category] += (uint64_t)record->recv_bytes;
    }
}

/* Adds the counters of @comm and of its parts to @sum. */
static void add_counters(const colo_comm_t *comm, colo_comm_stats_t *sum)
{
    pthread_mutex_lock(comm->lock);
    for (int k = 0; k < COLO_OP_COUNT; k++)
        for (int w = 0; w < COLO_CATEGORY_COUNT; w++) {
            sum->ops[k][w] += comm->stats.ops[k][w];
            sum->sent_bytes[k][w] += comm->stats.sent_bytes[k][w];
            sum->recv_bytes[k][w] += comm->stats.recv_bytes[k][w];
        }
    const colo_comm_t *part = comm->part;
    pthread_mutex_unlock(comm->lock);
    for (; part; part = part->next_part) /* none goes before comm */
        add_counters(part, sum);
}

colo_status_t colo_comm_stats(const colo_comm_t *comm, colo_comm_stats_t *stats)
{
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "comm_stats: the comm is NULL");
    if (!colo_comm_is_own(comm, "comm_stats"))
        return COLO_ERR_STATE;
    colo_comm_stats_t sum = {0};
    add_counters(comm, &sum);
    return COLO_SIZED_WRITE(stats, &sum, "comm_stats: stats", "COLO_COMM_STATS_INIT");
}

void colo_comm_stats_reset(colo_comm_t *comm)
{
    if (!comm || !colo_comm_is_own(comm, "comm_stats_reset"))
        return;
    pthread_mutex_lock(comm->lock);
    memset(&comm->stats, 0, sizeof comm->stats);
    colo_comm_t *part = comm->part;
    pthread_mutex_unlock(comm->lock);
    for (; part; part = part->next_part)
        colo_comm_stats_reset(part);
}

/* ---- JSON ---- */

/* Bytes outside ASCII become \u00XX, so that any name gives valid JSON. */
static void put_string(colo_text_t *out, const char *s)
{
    colo_put(out, "\"");
    for (; *s; s++) {
        unsigned char ch = (unsigned char)*s;
        if (ch == '"' || ch == '\\')
            colo_put(out, "\\%c", ch);
        else if (ch < 0x20 || ch >= 0x7f)
            colo_put(out, "\\u%04x", ch);
        else
            colo_put(out, "%c", ch);
    }
    colo_put(out, "\"");
}

/* @number for a program to read, "12.345678901" in each locale. Returns @text. */
static const char *decimal(char text[32], double number)
{
    const int64_t billionths = llround((number < 0 ? -number : number) * 1e9);
    snprintf(text, 32, "%s%" PRId64 ".%09" PRId64, number < 0 ? "-" : "", billionths / 1000000000,
             billionths % 1000000000);
    return text;
}

static void put_counters(colo_text_t *out, const colo_comm_stats_t *stats)
{
    const char *sep = "";
    for (int k = 0; k < COLO_OP_COUNT; k++)
        for (int w = 0; w < COLO_CATEGORY_COUNT; w++)
            if (stats->ops[k][w]) {
                colo_put(out,
                         "%s{\"op\":\"%s\",\"category\":\"%s\",\"ops\":%llu,\"sent_bytes\":%llu,"
                         "\"recv_bytes\":%llu}",
                         sep, colo_op_name((colo_op_kind_t)k),
                         colo_category_name((colo_category_t)w),
                         (unsigned long long)stats->ops[k][w],
                         (unsigned long long)stats->sent_bytes[k][w],
                         (unsigned long long)stats->recv_bytes[k][w]);
                sep = ",";
            }
}

/* What dump shows of a comm, so that it holds the lock for a copy and not for the text: the comm's
 * thread needs the lock twice an operation. */
struct snapshot {
    char name[sizeof((colo_comm_t *)0)->name];
    int64_t world_rank;
    uint64_t seq;
    colo_comm_stats_t stats;
    colo_record_t record[COLO_RECORDS];
};

static void put_records(colo_text_t *out, const struct snapshot *snapshot)
{
    uint64_t first = snapshot->seq > COLO_RECORDS ? snapshot->seq - COLO_RECORDS + 1 : 1;
    char begin[32], end[32];
    for (uint64_t seq = first; seq <= snapshot->seq; seq++) {
        const colo_record_t *record = &snapshot->record[seq % COLO_RECORDS];
        colo_put(
            out,
            "%s{\"seq\":%llu,\"op\":\"%s\",\"category\":\"%s\",\"dtype\":\"%s\",\"count\":%lld,"
            "\"sent_bytes\":%lld,"
            "\"recv_bytes\":%lld,\"peers\":%d,\"ticket\":%llu,\"status\":\"%s\",\"begin\":%s,",
            seq == first ? "" : ",", (unsigned long long)record->seq, colo_op_name(record->kind),
            colo_category_name(record->category), colo_dtype_name(record->dtype),
            (long long)(record->kind == COLO_OP_EXCHANGE ? 0 : record->count),
            (long long)record->sent_bytes, (long long)record->recv_bytes, (int)record->peers,
            (unsigned long long)record->ticket, colo_status_name(record->status),
            decimal(begin, record->begin));
        if (record->status == COLO_PENDING)
            colo_put(out, "\"end\":null}");
        else
            colo_put(out, "\"end\":%s}", decimal(end, record->end));
    }
}

size_t colo_comm_dump_state(const colo_comm_t *comm, const colo_status_t *state,
                            const char *error_message, char *text, size_t cap)
{
    colo_text_t out = {.data = text, .cap = text ? cap : 0};
    char host[256] = "", text_of[2][32];
    struct snapshot now;
    struct timespec wall;
    pthread_mutex_lock(comm->lock);
    memcpy(now.name, comm->name, sizeof now.name);
    now.world_rank = comm->world_rank[comm->rank];
    colo_put(&out, "{\"id\":\"%016llx\",\"members\":[", (unsigned long long)comm->id);
    for (int32_t r = 0; r < comm->size; r++)
        colo_put(&out, "%s%lld", r ? "," : "", (long long)comm->world_rank[r]);
    now.seq = comm->seq;
    now.stats = comm->stats;
    memcpy(now.record, comm->record, sizeof now.record);
    pthread_mutex_unlock(comm->lock);
    (void)gethostname(host, sizeof host - 1);
    clock_gettime(CLOCK_REALTIME, &wall);
    colo_put(&out, "],\"pid\":%d,\"host\":", (int)getpid());
    put_string(&out, host);
    colo_put(&out, ",\"name\":");
    put_string(&out, now.name);
    colo_put(&out, ",\"backend\":\"%s\",\"rank\":%d,\"size\":%d,\"world_rank\":%lld,\"seq\":%llu,",
             comm->backend->name, (int)comm->rank, (int)comm->size, (long long)now.world_rank,
             (unsigned long long)now.seq);
    if (state) {
        colo_put(&out, "\"status\":\"%s\",\"error\":", colo_status_name(*state));
        put_string(&out, error_message);
        colo_put(&out, ",");
    }
    colo_put(&out, "\"timeout_ms\":%lld,\"now\":%s,\"wall\":%s,\"stats\":[",
             (long long)colo_comm_timeout(comm), decimal(text_of[0], colo_now()),
             decimal(text_of[1], (double)wall.tv_sec + (double)wall.tv_nsec * 1e-9));
    put_counters(&out, &now.stats);
    colo_put(&out, "],\"ring\":[");
    put_records(&out, &now);
    colo_put(&out, "]}");
    return out.len;
}

size_t colo_comm_dump(const colo_comm_t *comm, char *text, size_t cap)
{
    if (!comm || !colo_comm_is_own(comm, "comm_dump"))
        return (size_t)snprintf(text, text ? cap : 0, "null");
    char error_message[1000] = "";
    const colo_status_t state = comm->backend->state(comm, error_message, sizeof error_message);
    return colo_comm_dump_state(comm, &state, error_message, text, cap);
}
