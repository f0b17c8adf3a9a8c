/* SPDX-License-Identifier: Apache-2.0 */
/* spec.c - "tp=2,cp=4" as any text: what is taken means what it says, and prints as it reads. */
#include "fuzz.h"

static void check_ranks(const colo_grid_t *g)
{
    const int64_t n = g->size;
    const int64_t some[] = {0, 1, n / 3, n / 2, n - 1};
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++) {
        int64_t coords[COLO_DIMS_MAX], back = -1, number = 0, stride = 1;
        if (some[i] >= n)
            continue;
        const int64_t rank = g->offset + some[i];
        FUZZ_CHECK(colo_grid_coords(g, rank, coords) == COLO_OK, "%s", colo_last_error());
        for (int32_t d = 0; d < g->ndims; d++) {
            FUZZ_CHECK(coords[d] >= 0 && coords[d] < g->extent[d], "dim %d", (int)d);
            number += coords[d] * stride;
            stride *= g->extent[d];
        }
        FUZZ_CHECK(number == some[i], "rank %lld has the coordinates of %lld", (long long)some[i],
                   (long long)number);
        FUZZ_CHECK(colo_grid_rank(g, coords, &back) == COLO_OK && back == rank, "%lld",
                   (long long)back);
    }
    FUZZ_CHECK(!colo_grid_has_rank(g, g->offset + n) && !colo_grid_has_rank(g, g->offset - 1),
               "size");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_t f = {data, size};
    const int64_t world = fuzz_i64(&f);
    const size_t spec = f.left - f.left / 4;
    const char *text = (const char *)f.data;
    colo_grid_t g, again;
    colo_status_t st = colo_grid_parse_n(&g, text, spec, world);
    if (st < 0) {
        FUZZ_REFUSED(st);
        return 0;
    }
    int64_t product = 1;
    for (int32_t d = 0; d < g.ndims; d++)
        product *= g.extent[d];
    FUZZ_CHECK(product == g.size, "%lld != %lld", (long long)product, (long long)g.size);
    check_ranks(&g);
    char printed[1024], dims[256], key[COLO_KEY_MAX];
    FUZZ_CHECK(colo_grid_print(&g, printed, sizeof printed) < sizeof printed, "print");
    FUZZ_CHECK(colo_grid_parse(&again, printed, 0) == COLO_OK, "'%s': %s", printed,
               colo_last_error());
    FUZZ_CHECK(colo_grid_equal(&g, &again) && colo_grid_hash(&g) == colo_grid_hash(&again), "%s",
               printed);

    /* the rest of the text as names of dims */
    snprintf(dims, sizeof dims, "%.*s", (int)(f.left - spec), text + spec);
    colo_group_t group;
    st = colo_grid_group(&g, dims, g.offset, &group);
    if (st < 0)
        FUZZ_REFUSED(st);
    else {
        FUZZ_CHECK(group.size >= 1 && g.size % group.size == 0, "a group of %lld",
                   (long long)group.size);
        FUZZ_CHECK(colo_group_find(&group, colo_group_member(&group, group.size - 1)) ==
                       group.size - 1,
                   "'%s'", dims);
        FUZZ_CHECK(colo_grid_key(&g, dims, key) == COLO_OK, "%s", colo_last_error());
    }
    return 0;
}
