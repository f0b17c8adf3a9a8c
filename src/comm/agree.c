/* SPDX-License-Identifier: Apache-2.0 */
/*
 * agree.c - ranks comparing notes before they do something together.
 *
 * At create (COLO_CHECK >= 1) a hash of what is being made, before every operation
 * (COLO_CHECK = 2) the operation itself and, for an exchange, every pair's boxes. All ranks reach
 * the same verdict from the same gathered words, so all return an error or none does, nothing has
 * moved and the comm stays usable. If hashes differ, two ranks' fields follow as text. Everything
 * here is counted for COLO_CATEGORY_CHECK.
 */
#include "comm/comm.h"
#include "core/hash.h"
#include "core/error.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* An all-gather of words, or a broadcast, of the library's own host memory: a comm of GPUs has its
 * control do it, and counts it, too. */
static colo_status_t over_host(colo_comm_t *comm, colo_op_desc_t op, const void *send, void *recv)
{
    const uint64_t seq = colo_comm_begin_collective(comm, op);
    if (!comm->control)
        return colo_comm_finish(comm, seq, comm->backend->collective(comm, send, recv, NULL));
    colo_comm_t *control = colo_comm_control(comm);
    colo_status_t st = colo_comm_ready(control, op);
    if (op.kind != COLO_OP_BROADCAST)
        op = (colo_op_desc_t){COLO_OP_ALL_GATHER, COLO_I64, 1, op.count, COLO_CATEGORY_CHECK};
    COLO_THEN(st, over_host(control, op, send, recv));
    return colo_comm_finish(comm, seq, st);
}

colo_status_t colo_comm_gather(colo_comm_t *comm, colo_op_kind_t kind, colo_category_t category,
                               const uint64_t *mine, uint64_t *all, int64_t n)
{
    const colo_op_desc_t op = {
        kind, COLO_I64, kind == COLO_OP_ALL_GATHER && category == COLO_CATEGORY_CHECK, n, category};
    if (!colo_comm_is_own(comm, colo_op_name(kind)))
        return COLO_ERR_STATE;
    return over_host(comm, op, mine, all);
}

/* @text of rank @from to all. */
static colo_status_t broadcast_text(colo_comm_t *comm, char *text, int64_t bytes, int32_t from)
{
    const colo_op_desc_t op = {COLO_OP_BROADCAST, COLO_U8, from, bytes, COLO_CATEGORY_CHECK};
    return over_host(comm, op, NULL, text);
}

/* Rank @from brings an error: all others learn its error message. Collective. */
static colo_status_t broadcast_error(colo_comm_t *comm, const char *what, int32_t from,
                                     colo_status_t mine)
{
    const colo_error_t earlier = colo_error_save(); /* a failing broadcast would overwrite it */
    char error_message[512];
    memset(error_message, 0, sizeof error_message);
    snprintf(error_message, sizeof error_message, "%.511s", earlier.text);
    COLO_TRY(broadcast_text(comm, error_message, sizeof error_message, from));
    if (mine < 0)
        return colo_error_restore(mine, &earlier);
    return colo_fail(COLO_ERR_PEER, "%s: rank %d failed: %s", what, (int)from, error_message);
}

/* ---- fields ---- */

enum { OPTIONAL = '?' }; /* begins the line of a field that a rank may lack */

static void add_field(colo_fields_t *fields, bool optional, const char *name, const char *fmt,
                      va_list ap)
{
    char value[256];
    uint64_t *hash = optional ? &fields->optional : &fields->hash;
    vsnprintf(value, sizeof value, fmt, ap);
    *hash = colo_hash_str(colo_hash_str(*hash ? *hash : COLO_HASH_INIT, name), value);
    const size_t left = sizeof fields->text - fields->length;
    const int n = snprintf(fields->text + fields->length, left, "%s%s\t%s\n", optional ? "?" : "",
                           name, value);
    if (n > 0 && (size_t)n < left)
        fields->length += (size_t)n;
    else
        fields->text[fields->length] = '\0'; /* a field is there as a whole, or not */
}

void colo_fields_add(colo_fields_t *fields, const char *name, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    add_field(fields, false, name, fmt, ap);
    va_end(ap);
}

void colo_fields_add_optional(colo_fields_t *fields, const char *name, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    add_field(fields, true, name, fmt, ap);
    va_end(ap);
}

/* The value of the field that @line begins with, in @text; up to its newline. NULL: none. */
static const char *same_field(const char *text, const char *line)
{
    const size_t name = strcspn(line, "\t") + 1;
    for (const char *p = text; *p; p += strcspn(p, "\n") + 1)
        if (strncmp(p, line, name) == 0)
            return p + name;
    return NULL;
}

enum { NAMED = 3 };

/* How many fields differ in the texts of rank @odd and of rank @than; @out has the first NAMED of
 * them: "dst: rank 3 of 'world' has A, rank 0 B; ...". */
static int describe_difference(const colo_comm_t *comm, int32_t odd, const char *theirs,
                               int32_t than, const char *first, char *out, size_t cap)
{
    int differ = 0;
    colo_text_t list = {.data = out, .cap = cap};
    for (const char *line = theirs; *line; line += strcspn(line, "\n") + 1) {
        const char *a = line + strcspn(line, "\t") + 1, *b = same_field(first, line);
        const int na = (int)strcspn(a, "\n"), nb = b ? (int)strcspn(b, "\n") : 0;
        const char *name = line + (*line == OPTIONAL);
        if ((!b && name > line) || (b && na == nb && strncmp(a, b, (size_t)na) == 0) ||
            ++differ > NAMED)
            continue;
        colo_put(&list, "%s%.*s: rank %d of '%s' has %.*s, rank %d %.*s", list.len ? "; " : "",
                 (int)(a - name - 1), name, (int)odd, comm->name, na, a, (int)than, b ? nb : 4,
                 b ? b : "none");
    }
    if (differ > NAMED)
        colo_put(&list, "; %d more differ", differ - NAMED);
    return differ;
}

/* Rank @odd brings another hash than rank @than: their fields travel, and the error message is the
 * same on all ranks. Collective. */
static colo_status_t name_difference(colo_comm_t *comm, const char *what,
                                     const colo_fields_t *fields, int32_t odd, int32_t than)
{
    char text[2][sizeof fields->text], out[640] = "";
    for (int i = 0; i < 2; i++) {
        memcpy(text[i], fields->text, sizeof fields->text);
        COLO_TRY(broadcast_text(comm, text[i], sizeof text[i], i ? odd : than));
        text[i][sizeof text[i] - 1] = '\0';
    }
    const int differ = describe_difference(comm, odd, text[1], than, text[0], out, sizeof out);
    COLO_FAIL_IF(differ > NAMED, COLO_ERR_MISMATCH,
                 "%s: rank %d of '%s' brings another one than rank %d, as if the calls of "
                 "ranks came in different orders: %s",
                 what, (int)odd, comm->name, (int)than, out);
    if (!differ)
        snprintf(out, sizeof out,
                 "rank %d of '%s' differs from rank %d in what is too long to send", (int)odd,
                 comm->name, (int)than);
    return colo_fail(COLO_ERR_MISMATCH, "%s: %s", what, out);
}

colo_status_t colo_comm_agree_fields(colo_comm_t *comm, const char *what, colo_fields_t *fields,
                                     colo_status_t mine)
{
    COLO_TRY(colo_comm_alive(comm, what));
    if (comm->size == 1)
        return mine;
    struct words {
        uint64_t hash, optional;
        int64_t status;
    } own, *first = NULL;
    COLO_AUTOFREE struct words *all = malloc(sizeof *all * (size_t)comm->size);
    if (!all)
        return colo_comm_fail(
            comm, colo_fail(COLO_ERR_NOMEM, "%s: agreement of %d ranks", what, (int)comm->size));
    colo_fields_add(fields, "call", "%s", what); /* two kinds of agreement may meet */
    own = (struct words){fields->hash, fields->optional, mine};
    COLO_TRY(colo_comm_gather(comm, COLO_OP_ALL_GATHER, COLO_CATEGORY_CHECK, &own.hash, &all->hash,
                              sizeof own / sizeof own.hash));
    for (int32_t r = 0; r < comm->size; r++)
        if (all[r].status < 0)
            return broadcast_error(comm, what, r, mine);
    for (int32_t r = 1; r < comm->size; r++)
        if (all[r].hash != all[0].hash)
            return name_difference(comm, what, fields, r, 0);
    for (int32_t r = 0; r < comm->size; r++) {
        first = !first && all[r].optional ? &all[r] : first;
        if (all[r].optional && all[r].optional != first->optional)
            return name_difference(comm, what, fields, r, (int32_t)(first - all));
    }
    return COLO_OK;
}

colo_status_t colo_comm_agree(colo_comm_t *comm, const char *what, uint64_t fingerprint,
                              colo_status_t mine)
{
    colo_fields_t fields = {COLO_FIELDS_INIT};
    colo_fields_add(&fields, "fingerprint", "%016llx", (unsigned long long)fingerprint);
    return colo_comm_agree_fields(comm, what, &fields, mine);
}

/* ---- threads of one process ---- */

uint64_t colo_comm_process(void)
{
    static _Atomic uint64_t nonce; /* process numbers repeat: on other hosts, in containers */
    uint64_t v = 0, none = 0;
    if (atomic_load(&nonce) == 0) {
        if (getrandom(&v, sizeof v, 0) != sizeof v || v == 0)
            v = (uint64_t)(colo_now() * 1e9) | 1;
        atomic_compare_exchange_strong(&nonce, &none, v);
    }
    return colo_hash_i64(atomic_load(&nonce), getpid()); /* fork() copies the nonce */
}

colo_status_t colo_comm_find_shared_process(colo_comm_t *comm, bool *shared)
{
    const size_t n = (size_t)comm->size;
    const uint64_t mine = colo_comm_process();
    *shared = false;
    COLO_AUTOFREE uint64_t *all = malloc(n * sizeof *all);
    if (!all)
        return colo_comm_fail(comm, colo_fail(COLO_ERR_NOMEM, "processes of %zu ranks", n));
    COLO_TRY(colo_comm_gather(comm, COLO_OP_ALL_GATHER, COLO_CATEGORY_CHECK, &mine, all, 1));
    for (size_t x = 0; x < n; x++)
        for (size_t y = x + 1; y < n; y++)
            *shared = *shared || all[x] == all[y];
    return COLO_OK;
}

colo_status_t colo_comm_host_barrier(colo_comm_t *comm, const char *what)
{
    if (!comm || comm->size == 1 || !comm->share_process)
        return COLO_OK;
    return colo_comm_agree(colo_comm_control(comm), what, 0, COLO_OK);
}

/* ---- before an operation ---- */

colo_status_t colo_comm_compare(colo_comm_t *comm, colo_op_desc_t op, colo_status_t mine)
{
    const char *what = colo_op_name(op.kind);
    if (comm->size == 1)
        return mine;
    COLO_AUTOFREE uint64_t *all = malloc(3 * sizeof *all * (size_t)comm->size);
    if (!all)
        return colo_comm_fail(
            comm, colo_fail(COLO_ERR_NOMEM, "%s: comparison of %d ranks", what, (int)comm->size));
    if (mine < 0) /* its numbers may be nonsense; the verdict is the error anyway */
        op.count = 0;
    uint64_t words[3] = {colo_op_pack(&op), (uint64_t)op.count, (uint64_t)(int64_t)mine};
    COLO_TRY(colo_comm_gather(comm, COLO_OP_ALL_GATHER, COLO_CATEGORY_CHECK, words, all, 3));
    for (int32_t r = 0; r < comm->size; r++)
        if ((int64_t)all[3 * r + 2] < 0)
            return broadcast_error(comm, what, r, mine);
    for (int32_t r = 1; r < comm->size; r++) {
        if (all[3 * r] == all[0] && all[3 * r + 1] == all[1])
            continue;
        char a[96], b[96];
        return colo_fail(
            COLO_ERR_MISMATCH, "before #%llu on '%s' rank 0 is about to run %s, rank %d %s",
            (unsigned long long)comm->seq + 1, comm->name,
            colo_op_describe(a, sizeof a, colo_op_unpack(all[0], all[1]), 0), (int)r,
            colo_op_describe(b, sizeof b, colo_op_unpack(all[3 * r], all[3 * r + 1]), 0));
    }
    return COLO_OK;
}

/* 0: no message; else a hash of its boxes' extents, never 0 */
static uint64_t message_print(const colo_message_t *message)
{
    uint64_t h = colo_hash_i64(COLO_HASH_INIT, message->nboxes);
    for (int32_t k = 0; k < message->nboxes; k++)
        for (int i = 0; i < 3; i++)
            h = colo_hash_i64(h, message->boxes[k].extent[i]);
    return h ? h : 1;
}

colo_status_t colo_comm_compare_messages(colo_comm_t *comm, const colo_exchange_t *exchange)
{
    const size_t n = (size_t)comm->size;
    if (n == 1)
        return COLO_OK;
    COLO_AUTOFREE uint64_t *mine = calloc(2 * n, sizeof *mine);
    COLO_AUTOFREE uint64_t *all = malloc(2 * n * n * sizeof *all);
    if (!mine || !all)
        return colo_comm_fail(comm,
                              colo_fail(COLO_ERR_NOMEM, "exchange: comparison of %zu ranks", n));
    for (int32_t i = 0; i < exchange->nsends; i++)
        mine[exchange->send[i].peer] = message_print(&exchange->send[i]);
    for (int32_t i = 0; i < exchange->nrecvs; i++)
        mine[n + (size_t)exchange->recv[i].peer] = message_print(&exchange->recv[i]);
    COLO_TRY(colo_comm_gather(comm, COLO_OP_ALL_GATHER, COLO_CATEGORY_CHECK, mine, all,
                              (int64_t)(2 * n)));
    for (size_t from = 0; from < n; from++)
        for (size_t to = 0; to < n; to++) {
            uint64_t sent = all[from * 2 * n + to], wanted = all[to * 2 * n + n + from];
            if (sent == wanted)
                continue;
            return colo_fail(COLO_ERR_MISMATCH,
                             "before #%llu on '%s': rank %zu sends rank %zu %s, which expects %s",
                             (unsigned long long)comm->seq + 1, comm->name, from, to,
                             sent ? wanted ? "other boxes than it expects" : "a message"
                                  : "no message",
                             wanted ? sent ? "boxes of other extents" : "one" : "none");
        }
    return COLO_OK;
}
