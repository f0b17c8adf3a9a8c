/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_plan_json.c - what colo-plan --json says is a plan: every element that a rank needs and does
 * not hold arrives exactly once from a rank that holds it, and the totals are the sums. Ownership
 * comes from plan_world.c, which shares no code with the library.
 */
#include "harness/harness.h"

#include "plan_world.h"
#include "tool.h"

#include <jansson.h>

#define CELL_BYTES (3 * 2) /* --hidden 3 --dtype bf16 */
#define SPEC 96

typedef struct world {
    const char *what;
    pw_side_t src, dst;
    int samples, rows;
    bool sharded;
    int per_node;
    const char *nodes; /* in place of per_node: a digit for each rank, numbered by first rank */
} world_t;

#define TP(n) {"tp", n}
#define CP(n) {"cp", n}
#define PP(n) {"pp", n}
#define DP(n) {"dp", n}
#define EP(n) {"ep", n}
#define SRC(...) {.grid = {.dim = {__VA_ARGS__}}, .stage = -2}
#define DST(...) {.grid = {.dim = {__VA_ARGS__}}}

static const world_t worlds[] = {
    {"fan-in", SRC(TP(2), DP(4)), DST(TP(2), CP(2), DP(2)), 8, 8, true, 0, NULL},
    {"fan-in, full", SRC(TP(2), DP(4)), DST(TP(2), CP(2), DP(2)), 8, 8, false, 0, NULL},
    {"fan-out", SRC(TP(4), DP(2)), DST(TP(1), CP(2), DP(4)), 8, 8, false, 0, NULL},
    {"fan-out by 8", SRC(TP(8), DP(1)), DST(TP(1), DP(8)), 8, 3, true, 0, NULL},
    {"equal", SRC(TP(4), DP(2)), DST(TP(2), CP(2), DP(2)), 4, 8, true, 0, NULL},
    {"dp that does not divide", SRC(TP(2), DP(3)), DST(TP(3), DP(2)), 6, 5, true, 0, NULL},
    {"batch that does not divide", SRC(TP(1), DP(6)), DST(TP(2), CP(1), DP(3)), 7, 4, false, 0,
     NULL},
    {"ranks without samples", SRC(DP(8)), DST(TP(2), DP(4)), 3, 4, true, 0, NULL},
    {"cp 3", SRC(TP(2), DP(6)), DST(CP(3), TP(2), DP(2)), 6, 12, true, 0, NULL},
    {"cp after dp", SRC(TP(2), DP(4)), DST(TP(2), DP(2), CP(2)), 8, 8, true, 0, NULL},
    {"dims in another order", SRC(DP(4), TP(2)), DST(DP(2), CP(2), TP(2)), 8, 8, true, 0, NULL},
    {"encoder with cp", SRC(TP(2), CP(2), DP(2)), DST(TP(1), CP(4), DP(2)), 4, 16, true, 0, NULL},
    {"an extra dim", SRC(TP(2), EP(2), DP(2)), DST(TP(2), CP(2), DP(2)), 4, 8, true, 0, NULL},
    {"pp on the LLM's side", SRC(TP(2), DP(4)), DST(TP(2), PP(2), DP(2)), 8, 6, true, 0, NULL},
    {"pp on both sides", SRC(TP(2), PP(2), DP(2)), DST(PP(2), CP(2), DP(2)), 4, 8, false, 0, NULL},
    {"two nodes", SRC(TP(2), DP(4)), DST(TP(4), DP(2)), 8, 4, true, 4, NULL},
    {"nodes of three", SRC(TP(2), DP(6)), DST(TP(6), DP(2)), 12, 4, true, 3, NULL},
    {"nodes that share what they lack", SRC(TP(4), DP(4)), DST(TP(2), CP(4), DP(2)), 4, 8, false, 4,
     NULL},
    {"a node of two besides three", SRC(TP(4), DP(2)), DST(TP(1), CP(4), DP(2)), 4, 8, false, 3,
     NULL},
    {"uneven, scattered nodes", SRC(TP(4), DP(2)), DST(TP(1), CP(4), DP(2)), 4, 8, false, 0,
     "0,1,1,0,1,2,1,2"},
    {"grids with offsets",
     {.grid = {{TP(2), DP(2)}, 4}, .stage = -2},
     {.grid = {{TP(1), DP(4)}, 4}},
     4,
     4,
     true,
     0,
     NULL},
    {"grids that only meet",
     {.grid = {{TP(2), DP(3)}, 0}, .stage = -2},
     {.grid = {{TP(2), DP(2)}, 3}},
     6,
     4,
     true,
     0,
     NULL},
    {"rows inside the LLM's sequence",
     SRC(TP(2), DP(4)),
     {.grid = {{TP(2), CP(2), DP(2)}, 0}, .offset = 0, .positions = 12},
     8,
     6,
     true,
     0,
     NULL},
    {"rows after text",
     SRC(TP(1), DP(8)),
     {.grid = {{CP(4), DP(2)}, 0}, .offset = 3, .positions = 16},
     8,
     7,
     true,
     0,
     NULL},
    {"sequence parallel",
     {.grid = {{TP(2), DP(4)}, 0}, .stage = -2, .sp = true},
     {.grid = {{TP(2), CP(2), DP(2)}, 0}, .sp = true},
     8,
     8,
     true,
     0,
     NULL},
};

static void spec(char *text, const pw_grid_t *g)
{
    size_t n = 0;
    for (int i = 0; i < PW_DIMS && g->dim[i].name; i++)
        n += (size_t)snprintf(text + n, SPEC - n, "%s%s=%d", i ? "," : "", g->dim[i].name,
                              g->dim[i].extent);
    if (g->offset)
        snprintf(text + n, SPEC - n, "@%d", g->offset);
}

static bool several_nodes(const world_t *w)
{
    return w->per_node || w->nodes;
}

static int node_of(const world_t *w, int64_t rank)
{
    return w->nodes ? w->nodes[2 * rank] - '0' : (int)rank / w->per_node;
}

static json_t *plan_of(const world_t *w, const char *max_ranks)
{
    char src[SPEC], dst[SPEC], batch[16], rows[16], node[16], offset[16], positions[16];
    spec(src, &w->src.grid);
    spec(dst, &w->dst.grid);
    snprintf(batch, sizeof batch, "%d", w->samples);
    snprintf(rows, sizeof rows, "%d", w->rows);
    snprintf(node, sizeof node, "%d", w->per_node);
    snprintf(offset, sizeof offset, "%d", w->dst.offset);
    snprintf(positions, sizeof positions, "%d", w->dst.positions ? w->dst.positions : w->rows);
    const char *sp = w->src.sp ? w->dst.sp ? "both" : "src" : w->dst.sp ? "dst" : "none";
    tool_output_t s = tool_run(words(
        "--src %s --dst %s --batch %s --seq %s --hidden 3 --dtype bf16 --json %s %s "
        "--output %s --grad disjoint --offset %s --llm-seq %s --sp %s --max-ranks %s",
        src, dst, batch, rows, w->nodes ? "--nodes" : "--ranks-per-node",
        w->nodes ? w->nodes : node, w->sharded ? "sharded" : "full", offset, positions, sp,
        max_ranks));
    if (s.exit != 0 || s.err_size != 0)
        fail_msg("%s: exit %d, stderr: %s", w->what, s.exit, s.err);
    json_error_t e;
    json_t *doc = json_loads(s.out, JSON_REJECT_DUPLICATES, &e);
    if (!doc)
        fail_msg("%s: %s at byte %d of: %s", w->what, e.text, e.position, s.out);
    return doc;
}

static int64_t number(json_t *o, const char *key)
{
    json_t *v = json_object_get(o, key);
    if (!json_is_integer(v))
        fail_msg("%s is no integer", key);
    return json_integer_value(v);
}

/* Exactly these keys, space separated. */
static void assert_keys(json_t *o, const char *keys)
{
    char copy[256], *save = NULL;
    size_t n = 0;
    assert_true(json_is_object(o));
    snprintf(copy, sizeof copy, "%s", keys);
    for (char *k = strtok_r(copy, " ", &save); k; k = strtok_r(NULL, " ", &save), n++)
        if (!json_object_get(o, k))
            fail_msg("key %s is missing", k);
    if (json_object_size(o) != n)
        fail_msg("%zu keys where \"%s\" are documented", json_object_size(o), keys);
}

/* Counts the elements of one message's boxes in @seen [samples][rows]; returns their bytes. */
static int64_t count_boxes(const world_t *w, json_t *boxes, int *seen)
{
    int64_t cells = 0;
    size_t i;
    json_t *box;
    assert_true(json_array_size(boxes) > 0);
    json_array_foreach(boxes, i, box) {
        int r[2][2];
        static const char *const axis[] = {"b", "s"};
        assert_keys(box, "b s");
        for (int a = 0; a < 2; a++) {
            json_t *range = json_object_get(box, axis[a]);
            assert_int_equal(json_array_size(range), 2);
            r[a][0] = (int)json_integer_value(json_array_get(range, 0));
            r[a][1] = (int)json_integer_value(json_array_get(range, 1));
            assert_true(0 <= r[a][0] && r[a][0] < r[a][1]);
            assert_true(r[a][1] <= (a ? w->rows : w->samples));
        }
        for (int b = r[0][0]; b < r[0][1]; b++)
            for (int s = r[1][0]; s < r[1][1]; s++, cells++)
                seen[b * w->rows + s]++;
    }
    return cells * CELL_BYTES;
}

/* The entry of @peer in a list of messages, NULL when there is none. */
static json_t *message_of(json_t *list, int64_t peer)
{
    size_t i;
    json_t *m;
    json_array_foreach(list, i, m)
        if (number(m, "peer") == peer)
            return m;
    return NULL;
}

static json_t *entry(json_t *doc, int rank)
{
    return json_array_get(json_object_get(doc, "ranks"), (size_t)rank);
}

static json_t *list_of(json_t *doc, int rank, const char *way, const char *kind)
{
    return json_object_get(json_object_get(entry(doc, rank), way), kind);
}

/* One rank, one way: what it needs arrives once, from ranks that hold it. */
static void check_receives(const world_t *w, json_t *doc, int rank, bool forward, int64_t sum[4])
{
    const char *way = forward ? "forward" : "backward";
    const pw_side_t *need = forward ? &w->dst : &w->src, *hold = forward ? &w->src : &w->dst;
    bool all_rows = forward && !w->sharded;
    json_t *recv = list_of(doc, rank, way, "recv"), *m;
    int *seen = calloc((size_t)(w->samples * w->rows), sizeof *seen);
    int64_t last = -1, bytes = 0, local = 0;
    size_t i;
    assert_keys(json_object_get(entry(doc, rank), way),
                several_nodes(w) ? "recv send relay_recv relay_send sum_recv sum_send"
                                 : "recv send");
    json_array_foreach(recv, i, m)
    {
        int64_t peer = number(m, "peer");
        assert_keys(m, "peer bytes boxes");
        assert_true(peer > last && peer != rank);
        last = peer;
        int *own = calloc((size_t)(w->samples * w->rows), sizeof *own);
        assert_true(number(m, "bytes") > 0);
        assert_int_equal(number(m, "bytes"), count_boxes(w, json_object_get(m, "boxes"), own));
        for (int k = 0; k < w->samples * w->rows; k++) {
            if (own[k] && !pw_owns(hold, (int)peer, k / w->rows, k % w->rows, w->samples, w->rows,
                                   false))
                fail_msg("%s: %s: rank %d gets (%d, %d) from %d, which does not hold it", w->what,
                         way, rank, k / w->rows, k % w->rows, (int)peer);
            seen[k] += own[k];
        }
        free(own);
        bytes += number(m, "bytes");
        json_t *mirror = message_of(list_of(doc, (int)peer, way, "send"), rank);
        if (!mirror || !json_equal(json_object_get(m, "boxes"), json_object_get(mirror, "boxes")) ||
            number(m, "bytes") != number(mirror, "bytes"))
            fail_msg("%s: %s: %d -> %d is not mirrored", w->what, way, (int)peer, rank);
    }
    json_array_foreach(list_of(doc, rank, way, "relay_recv"), i, m)
    {
        const int64_t peer = number(m, "peer");
        assert_true(peer != rank && node_of(w, peer) == node_of(w, rank));
        bytes += count_boxes(w, json_object_get(m, "boxes"), seen);
        if (!json_equal(json_object_get(m, "boxes"),
                        json_object_get(
                            message_of(list_of(doc, (int)peer, way, "relay_send"), rank), "boxes")))
            fail_msg("%s: %s: %d passes on to %d what that does not expect", w->what, way,
                     (int)peer, rank);
    }
    for (int k = 0; k < w->samples * w->rows; k++) {
        int b = k / w->rows, s = k % w->rows;
        bool needed = pw_owns(need, rank, b, s, w->samples, w->rows, all_rows);
        bool held = pw_owns(hold, rank, b, s, w->samples, w->rows, false);
        if (seen[k] != (needed && !held))
            fail_msg("%s: %s: rank %d gets (%d, %d) %d times; needed %d, held %d", w->what, way,
                     rank, b, s, seen[k], needed, held);
        local += needed && held ? CELL_BYTES : 0;
    }
    free(seen);
    sum[0] = bytes > sum[0] ? bytes : sum[0];
    sum[1] += bytes;
    sum[3] = local > sum[3] ? local : sum[3];
}

/* Sends ascend and each is somebody's receive; maximum of sent bytes into sum[2]. */
static void check_sends(const world_t *w, json_t *doc, int rank, bool forward, int64_t sum[4])
{
    const char *way = forward ? "forward" : "backward";
    json_t *send = list_of(doc, rank, way, "send"), *m;
    int64_t last = -1, bytes = 0;
    size_t i;
    json_array_foreach(send, i, m) {
        int64_t peer = number(m, "peer");
        assert_keys(m, "peer bytes boxes");
        assert_true(peer > last && peer != rank);
        last = peer;
        bytes += number(m, "bytes");
        if (!message_of(list_of(doc, (int)peer, way, "recv"), rank))
            fail_msg("%s: %s: %d sends to %d, which expects nothing", w->what, way, rank, (int)peer);
    }
    json_array_foreach(list_of(doc, rank, way, "relay_send"), i, m) bytes += number(m, "bytes");
    sum[2] = bytes > sum[2] ? bytes : sum[2];
}

/* What ranks of a node need and none of them holds enters it, and nothing else. */
static void check_node(const world_t *w, json_t *node, int n, bool forward, int64_t *in_all)
{
    int ranks = 0;
    const pw_side_t *need = forward ? &w->dst : &w->src, *hold = forward ? &w->src : &w->dst;
    json_t *o = json_object_get(node, forward ? "forward" : "backward");
    int64_t minimum = 0;
    assert_keys(node, "node ranks forward backward");
    assert_keys(o, "in minimum one_level");
    for (int r = 0; r < n; r++)
        ranks += node_of(w, r) == number(node, "node");
    assert_int_equal(number(node, "ranks"), ranks);
    for (int k = 0; k < w->samples * w->rows; k++) {
        bool needed = false, held = false;
        for (int r = 0; r < n; r++) {
            if (node_of(w, r) != number(node, "node"))
                continue;
            needed |= pw_owns(need, r, k / w->rows, k % w->rows, w->samples, w->rows,
                              forward && !w->sharded);
            held |= pw_owns(hold, r, k / w->rows, k % w->rows, w->samples, w->rows, false);
        }
        minimum += needed && !held ? CELL_BYTES : 0;
    }
    assert_int_equal(number(o, "minimum"), minimum);
    assert_int_equal(number(o, "in"), minimum);
    assert_true(number(o, "one_level") >= minimum);
    *in_all += minimum;
}

static void check_coords(const pw_grid_t *g, json_t *coords, int rank)
{
    size_t ndims = 0;
    for (int i = 0; i < PW_DIMS && g->dim[i].name; i++, ndims++)
        if (pw_coord(g, rank, "none") >= 0)
            assert_int_equal(number(coords, g->dim[i].name), pw_coord(g, rank, g->dim[i].name));
    assert_int_equal(json_object_size(coords), pw_coord(g, rank, "none") >= 0 ? ndims : 0);
}

T_CASE(every_needed_element_arrives_exactly_once)
{
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
        const world_t *w = &worlds[i];
        json_t *doc = plan_of(w, "64"), *ranks = json_object_get(doc, "ranks");
        int src_end = pw_end(&w->src.grid), dst_end = pw_end(&w->dst.grid);
        int n = src_end > dst_end ? src_end : dst_end;
        assert_keys(doc, several_nodes(w) ? "world direction scale output ranks nodes forward backward"
                                     : "world direction scale output ranks forward backward");
        assert_int_equal(number(doc, "world"), n);
        assert_int_equal(json_array_size(ranks), n);
        assert_string_equal(json_string_value(json_object_get(doc, "output")),
                            w->sharded ? "sharded" : "full");
        for (int f = 0; f < 2; f++) {
            int64_t sum[4] = {0};
            for (int r = 0; r < n; r++) {
                assert_keys(entry(doc, r), "rank src dst forward backward");
                assert_int_equal(number(entry(doc, r), "rank"), r);
                check_coords(&w->src.grid, json_object_get(entry(doc, r), "src"), r);
                check_coords(&w->dst.grid, json_object_get(entry(doc, r), "dst"), r);
                check_receives(w, doc, r, f, sum);
                check_sends(w, doc, r, f, sum);
            }
            json_t *t = json_object_get(doc, f ? "forward" : "backward");
            assert_keys(t, several_nodes(w)
                               ? "recv_bytes_max recv_bytes_total send_bytes_max local_bytes_max "
                                 "collective_recv_bytes_max slow_bytes_total slow_bytes_minimum "
                                 "slow_bytes_one_level seconds seconds_one_level"
                               : "recv_bytes_max recv_bytes_total send_bytes_max local_bytes_max "
                                 "collective_recv_bytes_max");
            json_t *nodes = json_object_get(doc, "nodes");
            int64_t in_all = 0;
            for (size_t m = 0; m < json_array_size(nodes); m++)
                check_node(w, json_array_get(nodes, m), n, f, &in_all);
            if (several_nodes(w)) {
                assert_int_equal(json_array_size(nodes), w->nodes ? 3 : (n - 1) / w->per_node + 1);
                assert_int_equal(number(t, "slow_bytes_total"), in_all);
                assert_int_equal(number(t, "slow_bytes_minimum"), in_all);
                assert_true(number(t, "slow_bytes_one_level") >= in_all);
            }
            assert_int_equal(number(t, "recv_bytes_max"), sum[0]);
            assert_int_equal(number(t, "recv_bytes_total"), sum[1]);
            assert_int_equal(number(t, "send_bytes_max"), sum[2]);
            assert_int_equal(number(t, "local_bytes_max"), sum[3]);
        }
        json_decref(doc);
    }
}

T_CASE(a_large_world_has_no_ranks_but_the_same_totals)
{
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
        json_auto_t *all = plan_of(&worlds[i], "64"), *few = plan_of(&worlds[i], "2");
        assert_keys(few, "world direction scale output ranks forward backward");
        assert_int_equal(json_array_size(json_object_get(few, "ranks")), 0);
        json_object_del(all, "ranks");
        json_object_del(all, "nodes");
        json_object_del(few, "ranks");
        assert_true(json_equal(all, few));
    }
}

/* null exactly where the word says so: s = scale, c = COLLECTIVE */
T_CASE(scale_and_collective_are_null_where_they_do_not_exist)
{
    static const struct {
        const char *what, *direction;
        int scale;
        bool collective;
    } expected[] = {
        {"fan-in", "fan_in", 2, true},
        {"fan-out", "fan_out", 2, true},
        {"fan-out by 8", "fan_out", 8, true},
        {"equal", "equal", 1, true},
        {"dp that does not divide", "fan_in", 0, false},
        {"cp 3", "fan_in", 3, true},
        {"cp after dp", "fan_in", 2, false},
        {"encoder with cp", "equal", 1, false},
        {"an extra dim", "equal", 1, false},
        {"pp on the LLM's side", "fan_in", 2, false},
        {"grids with offsets", "fan_out", 2, true},
        {"grids that only meet", "fan_in", 0, false},
    };
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        const world_t *w = worlds;
        while (strcmp(w->what, expected[i].what) != 0)
            w++;
        json_t *doc = plan_of(w, "64"), *scale = json_object_get(doc, "scale");
        assert_string_equal(json_string_value(json_object_get(doc, "direction")),
                            expected[i].direction);
        if (expected[i].scale ? json_integer_value(scale) != expected[i].scale : !json_is_null(scale))
            fail_msg("%s: scale is %lld", w->what, (long long)json_integer_value(scale));
        for (int f = 0; f < 2; f++) {
            json_t *t = json_object_get(doc, f ? "forward" : "backward");
            json_t *c = json_object_get(t, "collective_recv_bytes_max");
            if (expected[i].collective ? !json_is_integer(c) : !json_is_null(c))
                fail_msg("%s: collective_recv_bytes_max is %s", w->what,
                         json_is_null(c) ? "null" : "not null");
        }
        json_decref(doc);
    }
}

T_TOOL_MAIN("COLO_PLAN", "tools/plan_json")
