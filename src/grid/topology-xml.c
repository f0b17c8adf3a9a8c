/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topology-xml.c - looks through a topology file for what hwloc takes for granted.
 *
 * hwloc's reader trusts its own writer: an object without a cpuset, or siblings that overlap or
 * stand in another order, make it crash or write a box of text to stderr. A file that was cut or
 * edited must be a status instead. So every object that has processors is checked here: its sets
 * are there and well formed, lie in its parent's, and come after its elder siblings'; a processor
 * is one bit, its os_index. What the file means, and whether it is XML at all, is hwloc's to judge.
 */
#include "grid/topology-xml.h"

#include "core/error.h"
#include "grid/hwloc-load.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH_MAX 64
#define SET_MAX ((size_t)16384) /* bytes of a set as text: 10 a 32 processors */
#define CLASSES 2 /* objects with processors, memory; siblings of a class are disjoint */

typedef struct level {
    hwloc_bitmap_t set, nodes, seen[CLASSES]; /* its own sets; those of children so far */
    bool processors;                          /* false: a device, whose children have none either */
} level_t;

typedef struct reader {
    const char *quoted, *text, *pos, *end;
    bool memory, processor; /* there was a NUMA node, a processor */
    int depth;
    level_t level[DEPTH_MAX];
} reader_t;

static colo_status_t broken(const reader_t *reader, const char *what)
{
    int64_t line = 1;
    for (const char *c = reader->text; c < reader->pos; c++)
        line += *c == '\n';
    return colo_fail(COLO_ERR_IO, "topology '%s': line %lld: %s", reader->quoted, (long long)line,
                     what);
}

/* The value of attribute @name between @from and @to; NULL when it has none. */
static const char *attribute(const char *from, const char *to, const char *name, size_t *len)
{
    size_t n = strlen(name);
    bool quoted = false;
    for (const char *c = from; c < to; c++) {
        quoted ^= *c == '"';
        if (quoted || !isspace((unsigned char)*c) || (size_t)(to - c) < n + 4)
            continue;
        if (memcmp(c + 1, name, n) != 0 || c[n + 1] != '=' || c[n + 2] != '"')
            continue;
        const char *value = c + n + 3, *close = memchr(value, '"', (size_t)(to - value));
        *len = close ? (size_t)(close - value) : 0;
        return close ? value : NULL;
    }
    return NULL;
}

/* "0x000000ff,,0xf": false when it is missing or no set. */
static bool read_set(const char *from, const char *to, const char *name, hwloc_bitmap_t set)
{
    size_t len = 0;
    const char *value = attribute(from, to, name, &len);
    if (!value || len > SET_MAX || strspn(value, "0123456789abcdefx,") != len)
        return false;
    COLO_AUTOFREE char *text = strndup(value, len);
    return text && len > 0 && colo_hwloc.bitmap_sscanf(set, text) == 0;
}

static bool is_type(const char *type, size_t len, const char *const *list)
{
    for (; *list; list++)
        if (strlen(*list) == len && memcmp(*list, type, len) == 0)
            return true;
    return false;
}

static bool is_bit(hwloc_const_bitmap_t set, const char *from, const char *to)
{
    size_t len = 0;
    const char *value = attribute(from, to, "os_index", &len);
    return value && len > 0 && len < 9 && strspn(value, "0123456789") == len &&
           colo_hwloc.bitmap_weight(set) == 1 && colo_hwloc.bitmap_first(set) == atoi(value);
}

/* What the machine may use, where the file says so: something, and not what it does not have. */
static colo_status_t check_allowed(const reader_t *reader, const char *to, level_t *level)
{
    static const char *const name[CLASSES] = {"allowed_cpuset", "allowed_nodeset"};
    hwloc_bitmap_t allowed = level->seen[0], all[CLASSES] = {level->set, level->nodes};
    bool ok = true;
    size_t len;
    for (int i = 0; i < CLASSES && ok; i++)
        if (attribute(reader->pos, to, name[i], &len))
            ok = read_set(reader->pos, to, name[i], allowed) &&
                 !colo_hwloc.bitmap_iszero(allowed) &&
                 colo_hwloc.bitmap_isincluded(allowed, all[i]);
    colo_hwloc.bitmap_zero(allowed);
    return ok ? COLO_OK : broken(reader, "the machine's allowed sets are empty or not its own");
}

/* An object that has processors, or is memory (which may be near none); @level has its sets on
 * return. hwloc sorts by the complete sets, those with processors that may not be used. */
static colo_status_t check_sets(reader_t *reader, const char *to, const char *type, size_t len,
                                level_t *level)
{
    static const char *const memory[] = {"NUMANode", "MemCache", NULL};
    static const char *const pu[] = {"PU", NULL}, *const node[] = {"NUMANode", NULL};
    level_t *parent = reader->depth > 0 ? &reader->level[reader->depth - 1] : NULL;
    int kind = is_type(type, len, memory);
    hwloc_bitmap_t usable = level->seen[0];
    if (!read_set(reader->pos, to, "nodeset", level->nodes) ||
        !read_set(reader->pos, to, "cpuset", usable) ||
        !read_set(reader->pos, to, "complete_nodeset", level->nodes) ||
        !read_set(reader->pos, to, "complete_cpuset", level->set))
        return broken(reader, "an object lacks a cpuset or nodeset, or it is none");
    if (!colo_hwloc.bitmap_isincluded(usable, level->set) ||
        (!kind && colo_hwloc.bitmap_iszero(usable)))
        return broken(reader, "an object's cpuset is empty, or not in its complete_cpuset");
    colo_hwloc.bitmap_zero(usable);
    if (is_type(type, len, pu) && !is_bit(level->set, reader->pos, to))
        return broken(reader, "a processor's cpuset is not its os_index");
    if (is_type(type, len, node) && !is_bit(level->nodes, reader->pos, to))
        return broken(reader, "a NUMA node's nodeset is not its os_index");
    reader->memory |= is_type(type, len, node);
    reader->processor |= is_type(type, len, pu);
    if (!parent)
        return check_allowed(reader, to, level);
    if (!parent->processors || !colo_hwloc.bitmap_isincluded(level->set, parent->set) ||
        !colo_hwloc.bitmap_isincluded(level->nodes, parent->nodes))
        return broken(reader, "an object's cpuset or nodeset is not in its parent's");
    hwloc_bitmap_t seen = parent->seen[kind];
    hwloc_const_bitmap_t mine = kind ? level->nodes : level->set;
    if (colo_hwloc.bitmap_intersects(seen, mine) ||
        (!kind && colo_hwloc.bitmap_first(mine) < colo_hwloc.bitmap_first(seen)))
        return broken(reader, "objects overlap, or stand in the wrong order");
    return colo_hwloc.bitmap_or(seen, seen, mine) == 0 ? COLO_OK : broken(reader, "no memory");
}

static void drop(level_t *level)
{
    colo_hwloc.bitmap_free(level->set);
    colo_hwloc.bitmap_free(level->nodes);
    for (int i = 0; i < CLASSES; i++)
        colo_hwloc.bitmap_free(level->seen[i]);
    *level = (level_t){0};
}

/* "<object ...>" at reader->pos, to the '>' at @to */
static colo_status_t open_object(reader_t *reader, const char *to)
{
    static const char *const devices[] = {"Bridge", "PCIDev", "OSDev", "Misc", NULL};
    size_t len = 0;
    const char *type = attribute(reader->pos, to, "type", &len);
    if (!type)
        return broken(reader, "an object without a type");
    if (reader->depth == DEPTH_MAX)
        return broken(reader, "objects nest too deep");
    level_t *level = &reader->level[reader->depth];
    level->set = colo_hwloc.bitmap_alloc();
    level->nodes = colo_hwloc.bitmap_alloc();
    level->seen[0] = colo_hwloc.bitmap_alloc();
    level->seen[1] = colo_hwloc.bitmap_alloc();
    level->processors = !is_type(type, len, devices);
    colo_status_t st = COLO_OK;
    if (!level->set || !level->nodes || !level->seen[0] || !level->seen[1])
        st = broken(reader, "no memory");
    else if (level->processors)
        st = check_sets(reader, to, type, len, level);
    reader->depth++;
    if (st == COLO_OK && to[-1] == '/')
        drop(&reader->level[--reader->depth]);
    return st;
}

static colo_status_t read_tags(reader_t *reader)
{
    int64_t objects = 0;
    while ((reader->pos = memchr(reader->pos, '<', (size_t)(reader->end - reader->pos)))) {
        const char *to = memchr(reader->pos, '>', (size_t)(reader->end - reader->pos));
        if (!to)
            return broken(reader, "a tag does not end");
        if (to - reader->pos > 8 && memcmp(reader->pos, "<object ", 8) == 0) {
            if (reader->depth == 0 && objects > 0)
                return broken(reader, "a second machine");
            objects++;
            COLO_TRY(open_object(reader, to));
        } else if (to - reader->pos == 8 && memcmp(reader->pos, "</object", 8) == 0) {
            if (reader->depth == 0)
                return broken(reader, "an object ends that did not begin");
            drop(&reader->level[--reader->depth]);
        }
        reader->pos = to;
    }
    reader->pos = reader->end;
    if (reader->depth > 0 || objects == 0)
        return broken(reader, objects ? "the file ends within an object" : "no hwloc topology");
    if (!reader->memory || !reader->processor)
        return broken(reader, "no NUMA node or no processor in it; is it of hwloc 2 or later?");
    return COLO_OK;
}

colo_status_t colo_topology_xml_check(const char *quoted, const char *text, size_t size)
{
    COLO_AUTOFREE reader_t *reader = calloc(1, sizeof *reader);
    COLO_FAIL_IF(!reader, COLO_ERR_NOMEM, "topology '%s': %zu bytes", quoted, sizeof *reader);
    *reader = (reader_t){.quoted = quoted, .text = text, .pos = text, .end = text + size};
    colo_status_t st = COLO_OK;
    if (memchr(text, '\0', size)) {
        reader->pos = memchr(text, '\0', size);
        st = broken(reader, "a NUL byte; this is no text");
    } else {
        st = read_tags(reader);
    }
    while (reader->depth > 0)
        drop(&reader->level[--reader->depth]);
    return st;
}
