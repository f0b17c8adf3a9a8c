/* SPDX-License-Identifier: Apache-2.0 */
/*
 * captioner.h - what the parts of the captioner share: the model's sizes and parameters, the data.
 *
 * The model (letters as in docs/concepts/layouts.md; D width, F = 4D, E encoder hidden, V = 256 bytes):
 *   image    8 x 8 pixels / 16, cut into 16 patches of 2 x 2 (patch i at row i/4, column i%4; its 4
 *            pixels row by row)
 *   encoder  per patch p [4]:  enc = W2 gelu(W1 p + b1) + b2            W1 [E,4] W2 [D,E]
 *   merge    position s of a sample: s < 16 the image row s, else embed[token[s - 16]]; + pos[s]
 *            tokens: the caption's bytes, then NULs. The sequence has 16 + 6 = 22 positions that
 *            matter, padded with NUL tokens to S by colo_partition_padded()
 *   layer    a = LN1(x); x += Wo attention(Wq a + bq, Wk a + bk, Wv a + bv) + bo
 *            m = LN2(x); x += Wd gelu(Wu m + bu) + bd
 *            attention: causal, D/heads features a head (heads contiguous), scores / sqrt(D/heads)
 *   head     logits = head LNf(x)                                        head [V,D], no bias
 *   target   position s predicts the byte at position s + 1: from position 15 (the last image row)
 *            on, the caption's bytes and its NUL; everything else is ignored
 *   loss     mean negative log-likelihood over all target tokens of the *global* batch
 * A ragged sample has 0 to 3 images, each moved to the upper left and cut to its ink, so that an
 * image has as many rows as patches are left. Its sequence is the rows of its images, '>', and a
 * caption that names all digits ("seven three", or "none"). Row c of the position table belongs to
 * patch c of image i at 16 i + c, and to text byte k at 48 + k; '>' is byte 0. Samples share packed
 * sequences, and a position attends to its own sample only.
 * gelu(x) = x Phi(x) with erf; LN: eps 1e-5, biased variance, gain and bias. All weights are
 * [out, in] row-major, y = W x.
 */
#ifndef EXAMPLES_CAPTIONER_CAPTIONER_H
#define EXAMPLES_CAPTIONER_CAPTIONER_H

#include <stdbool.h>
#include <stdint.h>

enum {
    CAP_PIXELS = 64,
    CAP_PATCHES = 16,
    CAP_PATCH = 4,   /* pixels of a patch */
    CAP_TEXT = 6,    /* bytes of the longest caption of one digit with its NUL */
    CAP_IMAGES = 3,  /* most images of a sample */
    CAP_SAID = 18,   /* bytes of the longest caption of CAP_IMAGES digits with its NUL */
    CAP_BEGIN = '>', /* of a ragged sample's text */
    CAP_LENGTH = CAP_PATCHES + CAP_TEXT,
    CAP_VOCAB = 256,
    CAP_LONGEST = CAP_IMAGES * CAP_PATCHES + 1 + CAP_SAID, /* positions of a ragged sample */
    CAP_POSITIONS = 72, /* rows of the position table: the longest padded sequence or sample */
    CAP_MAX_PARAMS = 128
};

typedef struct cap_model {
    int64_t width;  /* D = 96 */
    int64_t heads;  /* 12 */
    int64_t hidden; /* E = 192 */
    int64_t layers; /* 2 */
} cap_model_t;
#define CAP_MODEL_DEFAULT {.width = 96, .heads = 12, .hidden = 192, .layers = 2}

/** What a sample is. Lists of samples have @most rows of the data set per sample; -1: no image. */
typedef struct cap_task {
    bool ragged;         /* images are cut to their ink, and samples packed */
    int64_t least, most; /* images per sample */
} cap_task_t;
#define CAP_TASK_DEFAULT                       \
    {                                          \
        .ragged = false, .least = 1, .most = 1 \
    }

typedef enum cap_cut {
    CAP_WHOLE = 0, /* the same on every tp rank */
    CAP_ROWS = 1,  /* tp rank t of W has rows [floor(t R / W), floor((t + 1) R / W)): column-parallel */
    CAP_COLS = 2   /* the same of columns: row-parallel */
} cap_cut_t;

typedef enum cap_init { CAP_INIT_NORMAL, CAP_INIT_ZERO, CAP_INIT_ONE } cap_init_t;

/** One parameter: vectors have rows = length, cols = 1. */
typedef struct cap_param {
    char name[24];  /* "enc.w1", "layer0.wq", "embed", "head" ... */
    bool encoder;   /* sharded by the source grid's tp; else by the destination's */
    int64_t layer;  /* llm: -1 front (embed, pos), 0..layers-1, layers: back (final norm, head) */
    int64_t rows, cols;
    cap_cut_t cut;
    cap_init_t init;
    double std; /* of CAP_INIT_NORMAL */
} cap_param_t;

/* ---- params.c ---- */

/** cap_params() - fills table [CAP_MAX_PARAMS], returns how many; the order is fixed:
 *  enc.w1 enc.b1 enc.w2 enc.b2 embed pos, per layer ln1.g ln1.b wq bq wk bk wv bv wo bo ln2.g ln2.b
 *  wu bu wd bd, then lnf.g lnf.b head. q, k, v, u, w1 and their biases and head are CAP_ROWS; wo, wd,
 *  w2 CAP_COLS; the rest whole (bo, bd, b2 are added once, after the sum over tp). */
int cap_params(const cap_model_t *model, cap_param_t *table);
/** cap_param_init() - whole weights of parameter @i from @seed; normal, independent of any layout */
void cap_param_init(const cap_param_t *table, int i, uint64_t seed, float *whole);
/** cap_param_shard_shape() - local rows and cols on tp rank @t of @w */
void cap_param_shard_shape(const cap_param_t *p, int64_t t, int64_t w, int64_t *rows, int64_t *cols);
/** cap_param_shard() - copy this shard out of whole; cap_param_unshard() - copy it back into whole */
void cap_param_shard(const cap_param_t *p, int64_t t, int64_t w, const float *whole, float *shard);
void cap_param_unshard(const cap_param_t *p, int64_t t, int64_t w, const float *shard, float *whole);

/* ---- data.c ---- */

typedef struct cap_data {
    int64_t n; /* 1797 */
    uint8_t (*pixels)[CAP_PIXELS];
    uint8_t *label;
    int64_t ntrain, nheld; /* rows with index mod 6 = 5 are held out (299), the rest trains (1498) */
    int64_t *train, *held; /* row indices */
} cap_data_t;

/** cap_data_load() - reads the CSV; returns 0, or -1 with one line in @why (file, line, found) */
int cap_data_load(cap_data_t *data, const char *path, char *why, int why_size);
void cap_data_free(cap_data_t *data);
/** cap_caption() - "zero" .. "nine" */
const char *cap_caption(int label);
/** cap_patches() - the image as [16][4] floats in 0..1 */
void cap_patches(const uint8_t *pixels, float *patches);
/** cap_batch() - image indices of the global batch of @step: a seeded shuffle of the training rows,
 *  walked epoch by epoch; the same for every layout */
void cap_batch(const cap_data_t *data, uint64_t seed, int64_t step, int64_t batch, int64_t *rows);

/** cap_crop() - the image's ink at the upper left: patches [16][4], of which those without a pixel
 * are left out, and the cell 0..15 of each. Returns how many there are */
int64_t cap_crop(const uint8_t *pixels, float *patches, int64_t *cell);
/** cap_samples() - the global batch of @step, [batch][most]; with one image per sample, cap_batch()
 */
void cap_samples(const cap_data_t *data, const cap_task_t *task, uint64_t seed, int64_t step,
                 int64_t batch, int64_t *rows);
/** cap_held_sample() - held-out sample @i of nheld, [most]: the same in every run */
void cap_held_sample(const cap_data_t *data, const cap_task_t *task, int64_t i, int64_t *rows);
/** cap_caption_text() - the caption of one sample: its digits, joined by blanks, or "none" */
void cap_caption_text(const cap_data_t *data, const cap_task_t *task, const int64_t *rows,
                      char text[CAP_SAID]);

/* ---- oracle.c: serial, fp64, plain loops; shares no code with the parallel model ---- */

/**
 * cap_oracle() - loss and every gradient of one global batch
 * @rows:   [n][most] samples
 * @whole:  [nparams] whole weights
 * @grads:  [nparams] out, whole-shape-state, written (not added)
 * Returns the loss; NaN when memory fails
 */
double cap_oracle(const cap_model_t *model, const cap_task_t *task, const cap_data_t *data,
                  const int64_t *rows, int64_t n, const float *const *whole, double *const *grads);

/** cap_progress() - called by anything longer than two seconds; may be NULL */
typedef void (*cap_progress_fn)(const char *what, double done, double total);

#endif
