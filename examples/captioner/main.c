/* SPDX-License-Identifier: Apache-2.0 */
/*
 * main.c - colo-captioner: a command line, and a model on ranks.
 *
 * Decides what a command line may say. Everything that can be known without another rank is checked
 * here, in one place, before a rank starts: one line on stderr with what was expected and found,
 * exit status 2. Exit status 1 is a problem found by running, 0 is none.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <colobridge/nccl.h>

#include "launch.h"
#include "rank.h"

/* Of OpenBLAS; absent with another CBLAS. */
void openblas_set_num_threads(int n) __attribute__((weak));

static const char usage[] =
    "usage: colo-captioner [options]\n"
    "Trains a small model to caption images of digits: an encoder in the layout --src\n"
    "and a language model in the layout --dst, on the same ranks, with the bridge\n"
    "between them.\n"
    "\n"
    "  --src SPEC        encoder grid of tp cp pp dp, first fastest    (tp=2,dp=4)\n"
    "  --dst SPEC        language model grid                         (tp=2,cp=2,dp=2)\n"
    "  --ranks KIND      threads: all ranks in this process          (threads)\n"
    "                    mpi: one process per rank, started by mpirun -n RANKS\n"
    "                    nccl: all ranks in this process, one GPU per rank\n"
    "  --steps N         training steps, 0..1000000       (%d; ragged %d)\n"
    "  --batch B         images of a global batch, 1..1024           (%d)\n"
    "  --lr X            peak learning rate                          (%g)\n"
    "  --seed S          seed of weights and shuffles                (1)\n"
    "  --output KIND     full: whole sequence | sharded: own rows    (full)\n"
    "  --ragged          cuts images to their ink, puts several or none into a\n"
    "                    sample, packs samples, and balances the encoder's work over\n"
    "                    the ranks\n"
    "  --images N-M      with --ragged: images per sample, 0 to 3    (0-3)\n"
    "  --dynamic-cp      with --ragged: each sample is a sequence of its own, on one\n"
    "                    context rank per 16 positions, at most on all\n"
    "  --grad KIND       with full: partial | disjoint               (partial)\n"
    "  --algo KIND       exact | collective                          (exact)\n"
    "  --head KIND       resident | sharded: its rows over dp x cp   (resident)\n"
    "  --loss KIND       logits | linear: head and loss in one, by chunks (logits)\n"
    "  --data PATH       the digits, 65 numbers per line\n"
    "  --report PATH     HTML report written at the end              (./report.html)\n"
    "  --check-gradients compare all gradients with a serial fp64 run, at first and\n"
    "                    after --steps (%d); last line is JSON\n"
    "  --json            a JSON summary on stdout, all else on stderr\n"
    "  --help, -h        this text\n"
    "\n"
    "exit status: 0 fine, 1 a problem was found, 2 wrong use\n"
    "\n"
    "example:\n"
    "  colo-captioner --src tp=1,dp=8 --dst tp=4,dp=2 --report r.html\n";

enum { STEPS = 700, RAGGED_STEPS = 1000, CHECK_STEPS = 20 };
enum { BATCH = 48, EVAL_EVERY = 50, RAGGED_EVAL_EVERY = 250 };
#define RATE 3e-3

static const char *const rank_kinds[] = {"threads", "mpi", "nccl"};
enum { THREADS, MPI, NCCL, KINDS };

static int wrong(const char *option, const char *expected, const char *found)
{
    char shown[81];
    size_t n = 0;

    for (; found[n] && n + 1 < sizeof shown; n++) /* one line, whatever was typed */
        shown[n] = (unsigned char)found[n] < ' ' || found[n] == 127 ? '?' : found[n];
    shown[n] = 0;
    fprintf(stderr, "colo-captioner: %s: expected %s, found '%s'\n", option, expected, shown);
    return 2;
}

static bool integer(const char *text, int64_t lo, int64_t hi, int64_t *out)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);

    if (errno || end == text || *end || strspn(text, "-0123456789") != strlen(text) || v < lo ||
        v > hi)
        return false;
    *out = v;
    return true;
}

/* "0-3", or "2" for "2-2" */
static bool range(const char *text, cap_task_t *task)
{
    char first[32];
    const char *dash = strchr(text, '-');

    snprintf(first, sizeof first, "%.*s", dash ? (int)(dash - text) : 31, text);
    return integer(first, 0, CAP_IMAGES, &task->least) &&
           integer(dash ? dash + 1 : text, task->least, CAP_IMAGES, &task->most);
}

static bool real(const char *text, double *out)
{
    char *end;
    errno = 0;
    double v = strtod(text, &end);

    if (errno || end == text || *end || strspn(text, "0123456789.eE+-") != strlen(text) ||
        !(v > 0) || v > 1)
        return false;
    *out = v;
    return true;
}

/* The grid with all four dims; those that the spec lacks come last, with extent 1. */
static int parse_grid(const char *option, const char *spec, colo_grid_t *grid, char *text,
                      size_t cap)
{
    static const char *const known[] = {"tp", "cp", "pp", "dp"};
    colo_grid_t g;
    colo_dim_t dims[8];
    int32_t n = 0;

    if (colo_grid_parse(&g, spec, 0) < 0) {
        fprintf(stderr, "colo-captioner: %s: %s\n", option, colo_last_error());
        return 2;
    }
    for (; n < g.ndims; n++) {
        bool found = false;
        for (int k = 0; k < 4; k++)
            found = found || !strcmp(g.name[n], known[k]);
        if (!found)
            return wrong(option, "dims among tp, cp, pp, dp", g.name[n]);
        dims[n] = (colo_dim_t){g.name[n], g.extent[n]};
    }
    for (int k = 0; k < 4; k++)
        if (colo_grid_dim(&g, known[k]) < 0)
            dims[n++] = (colo_dim_t){known[k], 1};
    if (colo_grid_init(grid, dims, n, g.offset, 0) < 0) {
        fprintf(stderr, "colo-captioner: %s: %s\n", option, colo_last_error());
        return 2;
    }
    if (g.offset + g.size > 1024)
        return wrong(option, "at most 1024 ranks", spec);
    colo_grid_print(&g, text, cap);
    return 0;
}

static int choice(const char *option, const char *value, const char *zero, const char *one,
                  int *out)
{
    char expected[64];

    *out = !strcmp(value, one);
    if (*out || !strcmp(value, zero))
        return 0;
    snprintf(expected, sizeof expected, "%s or %s", zero, one);
    return wrong(option, expected, value);
}

struct words {
    const char *src, *dst, *data, *images;
};

/* One option of takes_value() with its value. */
static int take_option(cap_config_t *c, struct words *w, const char *name, const char *value)
{
    int64_t n = 0;
    int k = 0, rc;

    if (!strcmp(name, "--src"))
        w->src = value;
    else if (!strcmp(name, "--dst"))
        w->dst = value;
    else if (!strcmp(name, "--data"))
        w->data = value;
    else if (!strcmp(name, "--images"))
        w->images = value;
    else if (!strcmp(name, "--report"))
        c->report = value;
    else if (!strcmp(name, "--ranks")) {
        for (k = 0; k < KINDS && strcmp(value, rank_kinds[k]);)
            k++;
        return k < KINDS ? 0 : wrong(name, "threads, mpi or nccl", value);
    } else if (!strcmp(name, "--steps"))
        return integer(value, 0, 1000000, &c->steps) ? 0
                                                     : wrong(name, "an integer 0..1000000", value);
    else if (!strcmp(name, "--batch"))
        return integer(value, 1, 1024, &c->batch) ? 0 : wrong(name, "an integer 1..1024", value);
    else if (!strcmp(name, "--lr"))
        return real(value, &c->lr) ? 0 : wrong(name, "a number above 0, at most 1", value);
    else if (!strcmp(name, "--seed")) {
        if (!integer(value, 0, INT64_MAX, &n))
            return wrong(name, "an integer 0..9223372036854775807", value);
        c->seed = (uint64_t)n;
    } else if (!strcmp(name, "--output")) {
        rc = choice(name, value, "full", "sharded", &k);
        c->output = k ? COLO_OUTPUT_SHARDED : COLO_OUTPUT_FULL_SEQ;
        return rc;
    } else if (!strcmp(name, "--grad")) {
        rc = choice(name, value, "partial", "disjoint", &k);
        c->grad = k ? COLO_GRAD_DISJOINT : COLO_GRAD_PARTIAL;
        return rc;
    } else if (!strcmp(name, "--algo")) {
        rc = choice(name, value, "exact", "collective", &k);
        c->algo = k ? COLO_ALGO_COLLECTIVE : COLO_ALGO_EXACT;
        return rc;
    } else if (!strcmp(name, "--head")) {
        rc = choice(name, value, "resident", "sharded", &k);
        c->head_sharded = k;
        return rc;
    } else if (!strcmp(name, "--loss")) {
        rc = choice(name, value, "logits", "linear", &k);
        c->loss_linear = k;
        return rc;
    }
    return 0;
}

static bool takes_value(const char *name)
{
    static const char *const all[] = {"--src",  "--dst",  "--ranks",  "--steps",  "--batch",
                                      "--lr",   "--seed", "--output", "--grad",   "--algo",
                                      "--head", "--loss", "--data",   "--report", "--images"};

    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(name, all[i]))
            return true;
    return false;
}

/* -1: go on; else the exit status */
static int parse(cap_config_t *c, struct words *w, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        char name[32];
        const char *value = strchr(argv[i], '=');
        size_t length = value ? (size_t)(value - argv[i]) : strlen(argv[i]);
        int rc;

        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
            printf(usage, STEPS, RAGGED_STEPS, BATCH, RATE, CHECK_STEPS);
            return 0;
        } else if (!strcmp(argv[i], "--json")) {
            c->json = true;
            continue;
        } else if (!strcmp(argv[i], "--ragged")) {
            c->task.ragged = true;
            continue;
        } else if (!strcmp(argv[i], "--dynamic-cp")) {
            c->dynamic_cp = true;
            continue;
        } else if (!strcmp(argv[i], "--check-gradients")) {
            c->check_gradients = true;
            continue;
        }
        if (length >= sizeof name)
            return wrong("command line", "an option of --help", argv[i]);
        memcpy(name, argv[i], length);
        name[length] = 0;
        if (!takes_value(name))
            return wrong("command line", "an option of --help", argv[i]);
        if (!value && i + 1 == argc)
            return wrong(name, "a value", "nothing");
        value = value ? value + 1 : argv[++i];
        rc = take_option(c, w, name, value);
        if (rc)
            return rc;
    }
    return -1;
}

/* What ragged samples are, and what they do not go together with. */
static int check_ragged(cap_config_t *c, const char *images)
{
    if (!c->task.ragged && c->dynamic_cp)
        return wrong("--dynamic-cp", "--ragged with it", "none");
    if (!c->task.ragged)
        return images ? wrong("--images", "--ragged with it", images) : 0;
    if (!range(images ? images : "0-3", &c->task))
        return wrong("--images", "N-M with 0 <= N <= M <= 3", images);
    if (c->algo != COLO_ALGO_EXACT)
        return wrong("--ragged", "--algo exact", "collective");
    return 0;
}

/* What no single option can be blamed for. */
static int check_together(cap_config_t *c)
{
    int64_t tp = colo_grid_extent(&c->dst, "tp"), cp = colo_grid_extent(&c->dst, "cp"), S;
    int64_t src = c->src.offset + c->src.size, dst = c->dst.offset + c->dst.size;
    colo_layout_t from, to;
    colo_plan_t *plan = NULL;
    char found[32];

    c->world = (int32_t)(src > dst ? src : dst);
    snprintf(found, sizeof found, "tp=%lld", (long long)tp);
    if (c->model.heads % tp)
        return wrong("--dst", "a tp that divides 12 heads", found);
    snprintf(found, sizeof found, "tp=%lld", (long long)colo_grid_extent(&c->src, "tp"));
    if (colo_grid_extent(&c->src, "tp") > c->model.hidden)
        return wrong("--src", "a tp of at most 192, the encoder's hidden size", found);
    if (c->output == COLO_OUTPUT_SHARDED && c->grad == COLO_GRAD_DISJOINT)
        c->grad = COLO_GRAD_PARTIAL; /* own rows come back: there is nothing to declare */
    if (c->task.ragged)
        return 0; /* sequences are made as long as they have to be */
    if (colo_partition_padded(CAP_LENGTH, tp, cp, false, &S) < 0 || S > CAP_POSITIONS) {
        fprintf(stderr,
                "colo-captioner: --dst: tp=%lld with cp=%lld needs a sequence of %lld positions, "
                "expected at most %d\n",
                (long long)tp, (long long)cp, (long long)S, CAP_POSITIONS);
        return 2;
    }
    colo_plan_config_t config = {
        COLO_PLAN_CONFIG_INIT,
        .src = &from,
        .dst = &to,
        .shape = {.samples = c->batch, .rows = CAP_PATCHES, .features = c->model.width},
        .dtype = COLO_F32,
        .output = c->output,
        .grad = c->grad};
    if (colo_layout_init_src(&from, &c->src) < 0 || colo_layout_init_dst(&to, &c->dst) < 0 ||
        colo_layout_map_offset(&to, 0, S) < 0 || colo_plan_create(&plan, &config, 0) < 0 ||
        (c->algo == COLO_ALGO_COLLECTIVE && colo_plan_collective_check(&config) < 0)) {
        fprintf(stderr, "colo-captioner: --src %s --dst %s: %s\n", c->src_text, c->dst_text,
                colo_last_error());
        colo_plan_destroy(&plan);
        return 2;
    }
    colo_plan_destroy(&plan);
    return 0;
}

/* Better now than after the training. */
static int check_report(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
    int rc = 0;

    if (!*path || (slash && !slash[1]))
        rc = wrong("--report", "the path of a file", path);
    else if (!folder || access(folder, W_OK | X_OK))
        rc = wrong("--report", "a path in a folder that can be written", path);
    free(folder);
    return rc;
}

static char *command_line(int argc, char **argv)
{
    size_t size = 1;
    for (int i = 0; i < argc; i++)
        size += strlen(argv[i]) + 1;
    char *text = calloc(size, 1);

    for (int i = 0; text && i < argc; i++) {
        const char *slash = i ? NULL : strrchr(argv[0], '/');
        strcat(strcat(text, i ? " " : ""), slash ? slash + 1 : argv[i]);
    }
    return text;
}

static colo_status_t model_main(cap_config_t *cfg, const cap_ops_t *ops, colo_comm_t *world,
                                colo_comm_t *host)
{
    cap_rank_t rank;
    colo_status_t st = cap_rank_create(&rank, cfg, ops, world, host);

    if (st >= 0)
        st = cfg->check_gradients ? cap_check_gradients(&rank) : cap_train(&rank);
    if (st >= 0) /* freeing waits for the device: no rank's work should still be on it */
        st = colo_comm_barrier(host, NULL);
    cap_rank_destroy(&rank);
    return st;
}

static colo_status_t rank_main(colo_comm_t *world, void *cfg)
{
    cap_ops_t ops;

    cap_ops_host(&ops);
    return model_main(cfg, &ops, world, world);
}

/* Rank r has GPU r, or r modulo the GPUs where they may be shared. */
static colo_status_t gpu_rank_main(colo_comm_t *host, void *cfg)
{
    colo_comm_t *gpus = NULL;
    cap_ops_t ops;
    char why[256];
    int32_t found = cap_gpus(why, sizeof why),
            device = colo_comm_rank(host) % (found > 0 ? found : 1);

    if (!cap_ops_cuda(&ops, device, why, sizeof why)) {
        fprintf(stderr, "colo-captioner: rank %d: %s\n", colo_comm_rank(host), why);
        return COLO_ERR_CUDA;
    }
    colo_status_t st = colo_comm_create_nccl(host, device, &gpus);
    if (st >= 0)
        st = model_main(cfg, &ops, gpus, host);
    else
        ops.destroy(&ops);
    colo_comm_destroy(&gpus);
    return st;
}

/* Which --ranks is on the command line: MPI wants to start before anything is parsed. */
static int wanted_kind(int argc, char **argv)
{
    int kind = THREADS;

    for (int i = 1; i < argc; i++) {
        const char *value = NULL;

        if (!strncmp(argv[i], "--ranks=", 8))
            value = argv[i] + 8;
        else if (!strcmp(argv[i], "--ranks") && i + 1 < argc)
            value = argv[i + 1];
        for (int k = 0; value && k < KINDS; k++)
            if (!strcmp(value, rank_kinds[k]))
                kind = k;
    }
    return kind;
}

/* Everything up to the first rank; 0, or the exit status with its line printed. -1: end well. */
static int prepare(cap_config_t *cfg, cap_data_t *data, int argc, char **argv)
{
    struct words words = {.src = "tp=2,dp=4", .dst = "tp=2,cp=2,dp=2"};
    char why[256];
    int rc = parse(cfg, &words, argc, argv);

    if (rc >= 0)
        return rc ? rc : -1;
    if ((rc = parse_grid("--src", words.src, &cfg->src, cfg->src_text, sizeof cfg->src_text)) ||
        (rc = parse_grid("--dst", words.dst, &cfg->dst, cfg->dst_text, sizeof cfg->dst_text)) ||
        (rc = check_ragged(cfg, words.images)) || (rc = check_together(cfg)) ||
        (!cfg->check_gradients && (rc = check_report(cfg->report))))
        return rc;
    if (cfg->steps < 0)
        cfg->steps = cfg->check_gradients  ? CHECK_STEPS
                     : cfg->task.ragged ? RAGGED_STEPS
                                        : STEPS;
    cfg->eval_every = cfg->task.ragged ? RAGGED_EVAL_EVERY : EVAL_EVERY;
    if (!words.data)
        words.data = access(CAP_DATA_INSTALLED, R_OK) ? CAP_DATA_SOURCE : CAP_DATA_INSTALLED;
    if (cap_data_load(data, words.data, why, sizeof why)) {
        fprintf(stderr, "colo-captioner: --data: %s\n", why);
        return 2;
    }
    cfg->data = data;
    return 0;
}

/* As many GPUs as ranks? NCCL 2.30 lets ranks share one, when told: to try things out. */
static int check_gpus(const cap_config_t *cfg)
{
    const char *share = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    char why[256];
    int found = cap_gpus(why, sizeof why);

    if (found >= cfg->world || (found > 0 && share && atoi(share)))
        return 0;
    if (found < 0)
        fprintf(stderr, "colo-captioner: --ranks nccl: %s\n", why);
    else
        fprintf(stderr, "colo-captioner: --ranks nccl: needs %d GPUs, found %d\n", cfg->world,
                found);
    return 2;
}

static int check_processes(const cap_config_t *cfg, int size)
{
    char expected[64], found[32];

    if (size == cfg->world)
        return 0;
    snprintf(expected, sizeof expected, "%d processes (mpirun -n %d)", (int)cfg->world,
             (int)cfg->world);
    snprintf(found, sizeof found, "%d", size);
    return wrong("--ranks mpi", expected, found);
}

static int finish(int rc)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return rc;
    fputs("colo-captioner: standard output did not take all of it; is the disk full?\n", stderr);
    return 1;
}

int main(int argc, char **argv)
{
    cap_config_t cfg = {.steps = -1,
                        .batch = BATCH,
                        .seed = 1,
                        .lr = RATE,
                        .output = COLO_OUTPUT_FULL_SEQ,
                        .report = "./report.html",
                        .model = CAP_MODEL_DEFAULT,
                        .task = CAP_TASK_DEFAULT};
    cap_data_t data = {0};
    int kind = wanted_kind(argc, argv), me = 0, size = 1;
    bool mpi = kind == MPI;
    char why[256];

    if (mpi && !cap_mpi_begin(&argc, &argv, &me, &size, why, sizeof why)) {
        fprintf(stderr, "colo-captioner: --ranks mpi: %s\n", why);
        return 2;
    }
    /* All processes read the same command line: rank 0 says what is wrong with it, once. */
    int keep = dup(STDERR_FILENO);
    if (me != 0 && (!freopen("/dev/null", "w", stderr) || !freopen("/dev/null", "w", stdout)))
        return 1;
    int rc = prepare(&cfg, &data, argc, argv);
    if (rc == 0 && mpi)
        rc = check_processes(&cfg, size);
    if (rc == 0 && kind == NCCL)
        rc = check_gpus(&cfg);
    fflush(stderr);
    if (me != 0 && keep >= 0)
        dup2(keep, STDERR_FILENO);
    close(keep);
    if (rc != 0) {
        if (mpi)
            cap_mpi_end(false);
        cap_data_free(&data);
        return finish(rc < 0 ? 0 : rc);
    }
    char *command = command_line(argc, argv);
    cfg.command = command ? command : "colo-captioner";
    if (openblas_set_num_threads)
        openblas_set_num_threads(1); /* one thread a rank; the ranks are the parallelism */

    colo_status_t st =
        mpi ? cap_mpi_run(rank_main, &cfg)
            : colo_comm_threads_run(cfg.world, kind == NCCL ? gpu_rank_main : rank_main, &cfg);
    if (st < 0 && (st != COLO_ERR_PEER || me == 0))
        fprintf(stderr, "colo-captioner: %s: %s\n", colo_status_name(st), colo_last_error());
    if (mpi)
        cap_mpi_end(st < 0);
    free(command);
    cap_data_free(&data);
    return finish(st < 0 ? 1 : cfg.exit_code);
}
