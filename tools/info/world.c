/* SPDX-License-Identifier: Apache-2.0 */
/*
 * world.c - colo-info --world: which ranks of a job share a node, what carries each pair and why.
 *
 * Each process of the job runs it. Rank and size come from what torchrun, mpirun or srun put in the
 * environment, the all-gather is files in a folder that all hosts see, and the communicator is that
 * of colo_comm_create_bootstrap(). So it also shows that the ranks can connect. Rank 0 prints.
 */
#include "info-tool.h"

#include <colobridge/bootstrap.h>
#include <colobridge/log.h>
#include <colobridge/memory.h>
#include <colobridge/nccl.h>

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    RANKS_MAX = 4096,
    PAIRS_SHOWN = 8,
    TELL_MS = 2000,
    FOLDER_MAX = 480,
    PATH_BYTES = FOLDER_MAX + 32
};

typedef struct fact { /* of one rank; the same size on all */
    char host[64], boot[64];
    char transport[8]; /* its COLO_TRANSPORT */
    bool named;        /* its COLO_NODE names its node */
    uint64_t net;      /* inode of its network namespace */
} fact_t;

typedef struct facts { /* of all ranks */
    const colo_comm_t *world;
    const fact_t *of;
    bool insisted;               /* a rank names the transport that the sockets do not reach */
    const colo_memory_t *memory; /* registered on all ranks, or NULL */
} facts_t;

typedef struct launcher {
    const char *name, *rank, *size;
} launcher_t;
static const launcher_t launchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE"},
    {"mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {"mpiexec (PMI)", "PMI_RANK", "PMI_SIZE"},
    {"srun", "SLURM_PROCID", "SLURM_NTASKS"},
};

/* ---- the all-gather ---- */

typedef struct folder {
    const char *path;
    int32_t rank, size, calls;
} folder_t;

static void path_of(const folder_t *f, int32_t rank, const char *part, char out[PATH_BYTES])
{
    snprintf(out, PATH_BYTES, "%s/colo-info-%d-%d%s", f->path, (int)f->calls, (int)rank, part);
}

static colo_status_t bad(const folder_t *f, const char *what)
{
    char words[PATH_BYTES + 200];
    snprintf(words, sizeof words, "rank %d of %d: %s/colo-info-%d-...: %s", (int)f->rank,
             (int)f->size, f->path, (int)f->calls, what);
    return colo_bootstrap_fail(COLO_ERR_IO, words);
}

static colo_status_t leave(const folder_t *f, const void *data, size_t bytes)
{
    char path[PATH_BYTES], part[PATH_BYTES];
    path_of(f, f->rank, "", path);
    path_of(f, f->rank, ".part", part);
    int fd = -1;
    errno = EEXIST;
    if (access(path, F_OK) != 0) /* O_EXCL: no link of another user is followed */
        fd = open(part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 && errno == EEXIST)
        return bad(f, "there is a file of an earlier run, expected a new folder for each run");
    const bool wrote = fd >= 0 && write(fd, data, bytes) == (ssize_t)bytes;
    if (fd >= 0)
        close(fd);
    /* others never see half of it */
    return wrote && rename(part, path) == 0 ? COLO_OK : bad(f, strerror(errno));
}

static bool take(const folder_t *f, int32_t rank, void *data, size_t bytes)
{
    char path[PATH_BYTES];
    path_of(f, rank, "", path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    const bool all = fd >= 0 && read(fd, data, bytes) == (ssize_t)bytes;
    if (fd >= 0)
        close(fd);
    return all;
}

static colo_status_t over_folder(void *user, const void *send, void *recv, size_t bytes)
{
    folder_t *f = user;
    f->calls++;
    /* A value that is not allowed is refused on all ranks once they have met. */
    const bool allowed = colo_env_check("COLO_TIMEOUT_MS") == COLO_OK;
    const int64_t limit_ms = allowed ? atoll(colo_env_value("COLO_TIMEOUT_MS", NULL)) : 600000;
    int64_t waited_ms = 0, told_ms = limit_ms < 2 * TELL_MS ? limit_ms / 2 : TELL_MS;
    colo_status_t st = leave(f, send, bytes);
    for (int32_t r = 0; r < f->size && st == COLO_OK;)
        if (take(f, r, (char *)recv + (size_t)r * bytes, bytes)) {
            r++;
        } else if (waited_ms >= limit_ms) {
            char what[96];
            snprintf(what, sizeof what, "rank %d has left no file after %lld ms", (int)r,
                     (long long)waited_ms);
            st = bad(f, what);
        } else {
            nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
            waited_ms += 20;
            if (waited_ms > told_ms && f->rank == (r == 0)) { /* one rank says so, for all */
                fprintf(stderr,
                        "%s: rank %d of %d waits for the file of rank %d, %lld ms at most\n",
                        tool_name, (int)f->rank, (int)f->size, (int)r, (long long)limit_ms);
                told_ms = INT64_MAX;
            }
        }
    return st;
}

/* ---- facts ---- */

static void find_fact(fact_t *f)
{
    struct stat net;
    memset(f, 0, sizeof *f);
    FILE *boot = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (boot && !fgets(f->boot, sizeof f->boot, boot))
        f->boot[0] = '\0';
    if (boot)
        fclose(boot);
    if (gethostname(f->host, sizeof f->host - 1) != 0)
        snprintf(f->host, sizeof f->host, "?");
    if (stat("/proc/self/ns/net", &net) == 0)
        f->net = net.st_ino;
    snprintf(f->transport, sizeof f->transport, "%s", colo_env_value("COLO_TRANSPORT", NULL));
    f->named = *colo_env_value("COLO_NODE", NULL);
}

/* ---- what carries a pair ---- */

/* All but ONE_NETWORK have one transport, which names the world's backend. */
enum { ONE_NETWORK, INSISTED, OTHER_NETWORK, OTHER_HOST, KINDS };
static const char *const reasons[KINDS] = {
    "they are on one host and one network namespace",
    "they are on one host, and COLO_TRANSPORT names it",
    "they are on one host, but two network namespaces (containers)",
    "they are on two hosts",
};

static int kind_of(const facts_t *facts, int32_t one, int32_t other)
{
    const fact_t *a = &facts->of[one], *b = &facts->of[other];
    if (strcmp(a->boot, b->boot) != 0)
        return OTHER_HOST;
    if (a->net != b->net)
        return strcmp(a->host, b->host) ? OTHER_HOST : OTHER_NETWORK;
    const bool one_node = a->named && b->named &&
                          colo_comm_node(facts->world, one) == colo_comm_node(facts->world, other);
    return facts->insisted && !one_node ? INSISTED : ONE_NETWORK;
}

static void print_node(const colo_comm_t *world, const fact_t *fact, int32_t node)
{
    const char *host = NULL, *between = "";
    for (int32_t r = 0; r < colo_comm_size(world); r++)
        if (colo_comm_node(world, r) == node && !host) {
            host = fact[r].host;
            printf("%4d  %-16s  ", (int)node, host);
        }
    for (int32_t r = 0, end; r < colo_comm_size(world); r = end + 1) {
        end = r;
        if (colo_comm_node(world, r) != node)
            continue;
        while (end + 1 < colo_comm_size(world) && colo_comm_node(world, end + 1) == node)
            end++;
        printf(end > r ? "%s%d-%d" : "%s%d", between, (int)r, (int)end);
        between = ",";
    }
    printf("\n");
}

enum { REACHED, TOLD, OTHER_NODE, NOT_REACHED, GPU_KINDS };
static const char *const gpu_kinds[GPU_KINDS][2] = {
    {"peer memory", "each reaches the other's"},
    {"NCCL", "COLO_TRANSPORT is nccl"},
    {"NCCL", "they are on two nodes"},
    {"NCCL", "they do not reach each other's (COLO_LOG=info says why)"},
};

static int gpu_kind_of(const facts_t *facts, int32_t one, int32_t other)
{
    if (colo_memory_reaches(facts->memory, one, other))
        return REACHED;
    if (strcmp(facts->of[one].transport, "nccl") == 0) /* the memory's ranks have one */
        return TOLD;
    return colo_comm_node(facts->world, one) != colo_comm_node(facts->world, other) ? OTHER_NODE
                                                                                    : NOT_REACHED;
}

static void print_pairs(const facts_t *facts, const char *const words[2], int kind,
                        int (*of)(const facts_t *facts, int32_t one, int32_t other))
{
    char shown[200] = "";
    size_t offset = 0;
    int64_t count = 0;
    const int32_t n = colo_comm_size(facts->world);
    for (int32_t a = 0; a < n; a++)
        for (int32_t b = a + 1; b < n; b++)
            if (of(facts, a, b) == kind && ++count <= PAIRS_SHOWN)
                offset += (size_t)snprintf(shown + offset, sizeof shown - offset, " %d-%d", (int)a,
                                           (int)b);
    if (count)
        printf("  %lld pairs by %s, because %s:%s%s\n", (long long)count, words[0], words[1], shown,
               count > PAIRS_SHOWN ? " ..." : "");
}

/* @memory: registered on all ranks, or NULL and why not. */
static void print_world(const colo_comm_t *world, const fact_t *fact, const char *launcher,
                        const colo_memory_t *memory, const char *why)
{
    const int32_t n = colo_comm_size(world), nodes = colo_comm_nodes(world);
    facts_t facts = {.world = world, .of = fact, .memory = memory};
    for (int32_t r = 0; r < n; r++)
        facts.insisted |= strcmp(fact[r].transport, colo_comm_backend(world)) == 0;
    printf("%d ranks of %s on %d node%s%s\n\nnode  host              ranks\n", (int)n, launcher,
           (int)nodes, nodes > 1 ? "s" : "", fact->named ? ", as COLO_NODE says" : "");
    for (int32_t k = 0; k < nodes; k++)
        print_node(world, fact, k);
    printf("\nHost memory and control\n");
    for (int k = 0; k < KINDS; k++) {
        const char *words[2] = {k == ONE_NETWORK ? "Unix socket" : colo_comm_backend(world),
                                reasons[k]};
        print_pairs(&facts, words, k, kind_of);
    }
    printf("No rank reaches another's host memory: they are processes.\n\n"
           "GPU memory that is registered; other GPU memory goes by NCCL\n");
    for (int k = 0; k < GPU_KINDS && memory; k++)
        print_pairs(&facts, gpu_kinds[k], k, gpu_kind_of);
    if (!memory)
        printf("  not known: %s\n", why);
}

/* ---- GPUs ---- */

/* Shows this process one device: the ranks of a host take in turn what it sees. */
static void take_device(const fact_t *fact, int32_t rank)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char list[512], own[16];
    int32_t index = 0, count = 0;
    for (int32_t r = 0; r < rank; r++)
        index += strcmp(fact[r].boot, fact[rank].boot) == 0;
    snprintf(own, sizeof own, "%d", (int)index);
    snprintf(list, sizeof list, "%s", visible ? visible : "");
    for (const char *c = list; *c; c++)
        count += c == list || *c == ',';
    char *rest = list, *name = count ? strtok_r(list, ",", &rest) : own;
    for (int32_t k = 0; count && k < index % count; k++)
        name = strtok_r(NULL, ",", &rest);
    if (name)
        setenv("CUDA_VISIBLE_DEVICES", name, 1);
}

/* A page of each rank, registered over a communicator of GPUs; NULL, and why on rank 0: there is
 * none. Ranks try and fail together. */
static void register_page(colo_comm_t *world, const fact_t *fact, colo_comm_t **gpus,
                          colo_memory_t **memory, char why[512])
{
    take_device(fact, colo_comm_rank(world));
    if (colo_comm_create_nccl(world, -1, gpus) != COLO_OK ||
        colo_memory_alloc(*gpus, 4096, memory) != COLO_OK)
        snprintf(why, 512, "%s", colo_last_error());
}

/* -1: no number */
static int32_t number(const char *text)
{
    char *end = NULL;
    const long n = strtol(text, &end, 10);
    return *text >= '0' && *text <= '9' && !*end && n <= RANKS_MAX ? (int32_t)n : -1;
}

int info_world(const char *path)
{
    const launcher_t *l = launchers, *end = l + sizeof launchers / sizeof launchers[0];
    while (l < end && (!getenv(l->rank) || !getenv(l->size)))
        l++;
    if (l == end)
        return tool_refuse("--world: neither torchrun, mpirun, mpiexec nor srun has started this "
                           "process; see docs/runtime/processes.md");
    const char *rank = getenv(l->rank), *size = getenv(l->size);
    folder_t f = {.path = path, .rank = number(rank), .size = number(size)};
    if (f.size < 1 || f.size > RANKS_MAX || f.rank < 0 || f.rank >= f.size)
        return tool_refuse(
            "--world: %s is '%.20s' and %s '%.20s', expected a rank below a size of 1..%d", l->rank,
            rank, l->size, size, RANKS_MAX);
    if (!*path || strlen(path) > FOLDER_MAX)
        return tool_refuse("--world: the name of the folder has %zu bytes, expected 1..%d",
                           strlen(path), FOLDER_MAX);
    (void)mkdir(path, 0700);
    colo_comm_t *world = NULL, *gpus = NULL;
    colo_memory_t *page = NULL;
    char why[512] = "";
    fact_t mine, *all = calloc((size_t)f.size, sizeof *all);
    const colo_bootstrap_t bootstrap = {COLO_BOOTSTRAP_INIT, f.rank, f.size, over_folder, &f};
    find_fact(&mine);
    colo_status_t st = all ? colo_comm_create_bootstrap(&bootstrap, &world) : COLO_ERR_NOMEM;
    if (st == COLO_OK)
        st = colo_comm_all_gather(world, &mine, all, (int64_t)sizeof mine, COLO_U8, NULL);
    if (st < 0)
        (void)tool_problem("--world: %s", colo_last_error());
    if (st == COLO_OK)
        register_page(world, all, &gpus, &page, why);
    if (st == COLO_OK && f.rank == 0)
        print_world(world, all, l->name, page, why);
    if (page)
        (void)colo_comm_barrier(world, NULL); /* no rank frees what another one has open */
    colo_memory_destroy(&page);
    colo_comm_destroy(&gpus);
    colo_comm_destroy(&world);
    free(all);
    return st < 0 ? TOOL_PROBLEM : TOOL_OK;
}
