/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flight.c - the last operations of a rank in a file that the analyzer of PyTorch's Flight Recorder
 * reads: it names the rank that is missing and the operation that differs.
 *
 * The analyzer takes one file per rank, so a file holds all comms that the rank made from one
 * world. It is a pickle of protocol 0, which is text, with the keys of version 2.10 of that format.
 * The analyzer aligns ranks by record_id, so an operation has there its number among all operations
 * of the rank, and the file holds the last COLO_RECORDS of these.
 */
#include "comm/comm.h"
#include "core/env.h"
#include "core/fork.h"

#include <colobridge/version.h>

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- the comms of this process ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
COLO_LOCK(writing); /* one file at a time: threads of a process write to one name first */
static colo_comm_t *newest;
static uint64_t worlds;

static void forget_all(void) /* after fork() */
{
    pthread_mutex_init(&lock, NULL);
    newest = NULL;
}

static void watch_fork(void)
{
    (void)pthread_atfork(NULL, NULL, forget_all);
}

void colo_comm_i_register(colo_comm_t *c)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_fork);
    pthread_mutex_lock(&lock);
    c->world = ++worlds;
    c->older = newest;
    newest = c;
    pthread_mutex_unlock(&lock);
}

void colo_comm_i_relate(colo_comm_t *c, const colo_comm_t *parent, uint64_t tag)
{
    uint64_t id = colo_hash_i64(colo_hash_i64(COLO_HASH_INIT, (int64_t)parent->id), (int64_t)tag);
    for (int32_t r = 0; r < c->size; r++)
        id = colo_hash_i64(id, c->world_rank[r]);
    pthread_mutex_lock(&lock);
    c->world = parent->world;
    c->id = id;
    pthread_mutex_unlock(&lock);
}

void colo_comm_i_unregister(colo_comm_t *c)
{
    colo_comm_t *relative = NULL;
    pthread_mutex_lock(&lock);
    for (colo_comm_t **link = &newest; *link;)
        if (*link == c) {
            *link = c->older;
        } else {
            relative = (*link)->world == c->world ? *link : relative;
            link = &(*link)->older;
        }
    if (relative)
        relative->ended += c->ended + c->seq;
    pthread_mutex_unlock(&lock);
}

/* ---- what the file says ---- */

struct entry {
    const colo_comm_t *comm;
    colo_record_t record;
};

static int by_begin(const void *a, const void *b)
{
    const colo_record_t *x = &((const struct entry *)a)->record;
    const colo_record_t *y = &((const struct entry *)b)->record;
    return x->begin < y->begin   ? -1
           : x->begin > y->begin ? 1
                                 : (x->seq > y->seq) - (x->seq < y->seq);
}

/* A key and its value: s sets an item of a dict, a appends to a list; ( d and ( l begin them. */
static void put_int(FILE *f, const char *key, int64_t value)
{
    fprintf(f, "V%s\nI%lld\ns", key, (long long)value);
}

static void put_text(FILE *f, const char *key, const char *value)
{
    fprintf(f, "V%s\nV", key);
    for (; *value; value++) { /* bytes as \u00XX: any name is a line */
        const unsigned char ch = (unsigned char)*value;
        fprintf(f, ch < 0x20 || ch >= 0x7f || ch == '\\' ? "\\u%04x" : "%c", ch);
    }
    fputs("\ns", f);
}

static void put_group_name(FILE *f, const colo_comm_t *c)
{
    fprintf(f, "V%s-%016llx\n", c->ops->name, (unsigned long long)c->id);
}

static void put_group(FILE *f, const colo_comm_t *c)
{
    put_group_name(f, c);
    fputs("(d", f);
    put_text(f, "name", c->name);
    put_text(f, "desc", c->ops->name); /* alike on all ranks, which a name need not be */
    fprintf(f, "Vranks\nV[");
    for (int32_t r = 0; r < c->size; r++)
        fprintf(f, "%s%lld", r ? ", " : "", (long long)c->world_rank[r]);
    fputs("]\nss", f);
}

static void put_status(FILE *f, const colo_comm_t *c)
{
    uint64_t done = c->seq;
    while (done > 0 && c->record[done % COLO_RECORDS].status != COLO_OK)
        done--;
    put_group_name(f, c);
    fputs("(d", f);
    put_int(f, "last_enqueued_collective", (int64_t)c->seq);
    put_int(f, "last_started_collective", (int64_t)c->seq);
    put_int(f, "last_completed_collective", (int64_t)done);
    fputs("s", f);
}

static void put_each(FILE *f, const colo_comm_t *c, void (*put)(FILE *, const colo_comm_t *))
{
    for (const colo_comm_t *o = newest; o; o = o->older)
        if (o->world == c->world) {
            pthread_mutex_lock(o->lock);
            put(f, o);
            pthread_mutex_unlock(o->lock);
        }
}

/* Elements in and out, and torch's name of the operation. */
static const char *describe(const struct entry *e, int64_t *in, int64_t *out)
{
    const colo_record_t *r = &e->record;
    const int64_t elem = (int64_t)colo_dtype_size(r->dtype), n = e->comm->size;
    *in = *out = r->count;
    switch (r->kind) {
    case COLO_OP_SPLIT:
    case COLO_OP_ALL_GATHER:
        *out = r->count * n;
        return "all_gather";
    case COLO_OP_REDUCE_SCATTER:
        *in = r->count * n;
        return "_reduce_scatter_base";
    case COLO_OP_ALL_REDUCE:
        return "all_reduce";
    case COLO_OP_BROADCAST:
        return "broadcast";
    case COLO_OP_EXCHANGE: /* its count is the hash of a plan */
        *in = elem ? r->sent_bytes / elem : 0;
        *out = elem ? r->recv_bytes / elem : 0;
        return "all_to_all";
    case COLO_OP_BARRIER:
    case COLO_OP_COUNT:
        break;
    }
    return "all_reduce_barrier";
}

static void put_entry(FILE *f, const struct entry *e, uint64_t number, double epoch)
{
    const colo_record_t *r = &e->record;
    char ms[32];
    int64_t in, out;
    const char *name = describe(e, &in, &out);
    fputs("(d", f);
    put_int(f, "record_id", (int64_t)number);
    put_int(f, "pg_id", (int64_t)(e->comm->id >> 1));
    fputs("Vprocess_group\n(", f);
    put_group_name(f, e->comm);
    fprintf(f, "V%s\nts", e->comm->ops->name);
    put_int(f, "collective_seq_id", (int64_t)r->seq);
    put_int(f, "p2p_seq_id", 0);
    put_int(f, "op_id", (int64_t)number);
    fprintf(f, "Vprofiling_name\nVnccl:%s\ns", name);
    fprintf(f, "Vinput_sizes\n((I%lld\nlls", (long long)in);
    fprintf(f, "Voutput_sizes\n((I%lld\nlls", (long long)out);
    fprintf(f, "Vinput_dtypes\n(V%s\nls", colo_dtype_name(r->dtype));
    fprintf(f, "Voutput_dtypes\n(V%s\nls", colo_dtype_name(r->dtype));
    put_text(f, "state", r->status == COLO_OK ? "completed" : "started");
    put_int(f, "time_created_ns", (int64_t)((epoch + r->begin) * 1e9));
    put_int(f, "time_discovered_started_ns", (int64_t)((epoch + r->begin) * 1e9));
    if (r->status == COLO_OK)
        put_int(f, "time_discovered_completed_ns", (int64_t)((epoch + r->end) * 1e9));
    else
        fputs("Vtime_discovered_completed_ns\nNs", f);
    if (r->status != COLO_PENDING)
        fprintf(f, "Vduration_ms\nF%s\ns", colo_comm_i_decimal(ms, (r->end - r->begin) * 1e3));
    put_int(f, "timeout_ms", colo_comm_i_timeout(e->comm));
    fprintf(f, "Vretired\nI%s\ns", r->status == COLO_PENDING ? "00" : "01");
    fputs("Vis_p2p\nI00\nsVframes\n(ls", f);
    put_text(f, "category", colo_category_name(r->category)); /* these two are ours */
    put_text(f, "status", colo_status_name(r->status));
    fputs("a", f);
}

/* Under the lock: the relatives of @c in @comms, the last operations in @entries; how many of
 * each, and the number of the first operation. */
static colo_status_t collect(const colo_comm_t *c, struct entry **entries, int32_t *n,
                             uint64_t *number)
{
    int64_t comms = 0;
    *number = 1;
    for (const colo_comm_t *o = newest; o; o = o->older)
        comms += o->world == c->world;
    struct entry *all = malloc(sizeof *all * (size_t)(comms * COLO_RECORDS + 1));
    if (!all)
        return colo_fail(COLO_ERR_NOMEM, "flight_record: %lld comms", (long long)comms);
    *n = 0;
    for (const colo_comm_t *o = newest; o; o = o->older) {
        if (o->world != c->world)
            continue;
        pthread_mutex_lock(o->lock);
        *number += o->seq + o->ended;
        for (uint64_t s = o->seq > COLO_RECORDS ? o->seq - COLO_RECORDS + 1 : 1; s <= o->seq; s++)
            all[(*n)++] = (struct entry){o, o->record[s % COLO_RECORDS]};
        pthread_mutex_unlock(o->lock);
    }
    qsort(all, (size_t)*n, sizeof *all, by_begin);
    if (*n > COLO_RECORDS) {
        memmove(all, all + *n - COLO_RECORDS, sizeof *all * COLO_RECORDS);
        *n = COLO_RECORDS;
    }
    *number -= (uint64_t)*n;
    *entries = all;
    return COLO_OK;
}

static void put_file(FILE *f, const colo_comm_t *c, const struct entry *entries, int32_t n,
                     uint64_t number)
{
    char host[256] = "", error_message[1000] = "", text[32];
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    const double epoch = (double)wall.tv_sec + (double)wall.tv_nsec * 1e-9 - colo_now();
    (void)gethostname(host, sizeof host - 1);
    fputs("(d", f);
    put_text(f, "version", "2.10");
    put_text(f, "comm_lib_version", colo_version());
    fputs("Vpg_config\n(d", f);
    put_each(f, c, put_group);
    fputs("sVpg_status\n(d", f);
    put_each(f, c, put_status);
    fputs("sVentries\n(l", f);
    for (int32_t i = 0; i < n; i++)
        put_entry(f, &entries[i], number + (uint64_t)i, epoch);
    const colo_status_t state = c->ops->state(c, error_message, sizeof error_message);
    fputs("sVcolobridge\n(d", f);
    put_text(f, "host", host);
    put_int(f, "pid", getpid());
    put_text(f, "group", c->name);
    put_text(f, "status", colo_status_name(state));
    put_text(f, "error", error_message);
    fprintf(f, "Vmonotonic_to_epoch_s\nF%s\nss.", colo_comm_i_decimal(text, epoch));
}

/* The file's text, made in memory: a file system may hang, and a thread that makes or destroys a
 * comm wants the lock meanwhile. */
static colo_status_t make_text(const colo_comm_t *c, char **text, size_t *bytes)
{
    COLO_AUTOFREE struct entry *entries = NULL;
    int32_t n = 0;
    uint64_t number = 0;
    FILE *f = open_memstream(text, bytes);
    if (!f)
        return colo_fail(COLO_ERR_NOMEM, "flight_record");
    pthread_mutex_lock(&lock);
    colo_status_t st = collect(c, &entries, &n, &number);
    if (st == COLO_OK)
        put_file(f, c, entries, n, number);
    pthread_mutex_unlock(&lock);
    const bool whole = !ferror(f), closed = fclose(f) == 0;
    return st < 0 || (whole && closed) ? st : colo_fail(COLO_ERR_NOMEM, "flight_record");
}

colo_status_t colo_comm_flight_record(const colo_comm_t *comm, const char *prefix)
{
    if (!comm || !prefix || !*prefix)
        return colo_fail(COLO_ERR_ARG, "flight_record: %s",
                         !comm ? "comm is NULL"
                               : "no prefix, expected the beginning of a file name");
    if (!colo_comm_i_own(comm, "flight_record"))
        return COLO_ERR_STATE;
    char path[4096], part[4096 + 32];
    const int length =
        snprintf(path, sizeof path, "%s%lld", prefix, (long long)comm->world_rank[comm->rank]);
    if (length >= (int)sizeof path)
        return colo_fail(COLO_ERR_ARG, "flight_record: the prefix has %zu bytes, expected < 4000",
                         strlen(prefix));
    snprintf(part, sizeof part, "%s.%d.part", path, (int)getpid());
    COLO_AUTOFREE char *text = NULL;
    size_t bytes = 0;
    COLO_TRY(make_text(comm, &text, &bytes));
    pthread_mutex_lock(&writing);
    /* Left by a process that ended; in a folder of all users, perhaps a link. */
    (void)unlink(part);
    errno = 0;
    FILE *f = fopen(part, "wxe");
    const bool written = f && fwrite(text, 1, bytes, f) == bytes, closed = f && fclose(f) == 0;
    const bool whole = written && closed && rename(part, path) == 0;
    const int error = errno;
    if (!whole)
        (void)unlink(part);
    pthread_mutex_unlock(&writing);
    return whole ? COLO_OK : colo_fail(COLO_ERR_IO, "flight_record: %s: %s", path, strerror(error));
}

void colo_comm_i_record_failure(colo_comm_t *c)
{
    const char *prefix = NULL;
    pthread_mutex_lock(&lock);
    const bool again = c->recorded;
    for (colo_comm_t *o = newest; o; o = o->older)
        o->recorded |= o->world == c->world;
    pthread_mutex_unlock(&lock);
    if (again)
        return;
    const colo_error_t earlier = colo_error_save();
    if (colo_env_text("COLO_FLIGHT_RECORDER", &prefix) == COLO_OK && *prefix &&
        colo_comm_flight_record(c, prefix) < 0)
        colo_log(COLO_LOG_WARN, "%s", colo_last_error());
    (void)colo_error_restore(COLO_OK, &earlier);
}
