/* SPDX-License-Identifier: Apache-2.0 */
/* colobridge.h - everything, in reading order. */
#ifndef COLOBRIDGE_H
#define COLOBRIDGE_H

#include <colobridge/status.h>
#include <colobridge/version.h>
#include <colobridge/log.h>
#include <colobridge/tensor.h>
#include <colobridge/grid.h>
#include <colobridge/comm.h>
#include <colobridge/bootstrap.h>
#include <colobridge/memory.h>
#include <colobridge/hypergrid.h>
#include <colobridge/layout.h>
#include <colobridge/plan.h>
#include <colobridge/topology.h>
#include <colobridge/packing.h>
#include <colobridge/segments.h>
#include <colobridge/bridge.h>
#include <colobridge/ragged.h>
#include <colobridge/ticket.h>
#include <colobridge/partition.h>
#include <colobridge/logits.h>
#include <colobridge/logprob.h>
#include <colobridge/topk.h>
#include <colobridge/sampling.h>
#include <colobridge/distill.h>
#include <colobridge/lm_head.h>
#include <colobridge/linear_logprob.h>
#include <colobridge/linear_distill.h>
#include <colobridge/sequence.h>
#include <colobridge/tape.h>

#endif
