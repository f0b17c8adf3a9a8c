/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logits.h - how raw logits z become the x of a softmax, and which columns of them a rank has. The
 * same struct is a member of every config of a loss over logits.
 *
 *   y = scale z;   x = softcap tanh(y / softcap) / temperature, or y / temperature if softcap is 0
 */
#ifndef COLOBRIDGE_LOGITS_H
#define COLOBRIDGE_LOGITS_H

#include <colobridge/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A value without struct_size: its size is fixed, because configs contain it. */
typedef struct colo_logits_options_t {
    int64_t vocab;       /* V, true vocabulary, > 0; columns >= V are padding */
    int64_t vocab_start; /* this rank's columns are [vocab_start, vocab_start + Vl); Vl may be 0 */
    double temperature;  /* finite, > 0 */
    double scale;        /* finite, as is scale / temperature */
    double softcap;      /* finite, >= 0; 0: off; an f32 holds softcap / temperature */
} colo_logits_options_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LOGITS_OPTIONS_INIT 0, 0, 1.0, 1.0, 0.0
#else
#define COLO_LOGITS_OPTIONS_INIT .temperature = 1.0, .scale = 1.0
#endif

#ifdef __cplusplus
}
#endif
#endif
