# SPDX-License-Identifier: Apache-2.0
"""Each C snippet of the pages in docs/ compiles as C11, without a warning of the build's compiler, gcc or clang.

usage: snippets.py COMPILER...
A snippet is a whole source, or it stands in a function. NAMES declares what it takes from the program around
it, by the heading above it (of level 2, or 1); an ellipsis stands for what a page leaves out. A snippet with MPI's header is left out: programs of
tests/mpi compile the same lines.
"""
import re
import shutil
import sys

from api import ROOT, complaints

ALL = '''#include <colobridge.h>
#include <colobridge/nccl.h>
#include <stdlib.h>
extern int64_t T, V, Vl, B, S, tp, cp, c;
extern int32_t W;
extern size_t saved_bytes, workspace_bytes;
extern void *saved_memory, *workspace, *stream;
extern colo_comm_t *world, *gpus, *group, *tp_group;
extern colo_tensor_t x, y, d_x, d_y, logits, d_logits, targets, tokens, weight, d_weight;
extern colo_bridge_t *bridge;
'''
LOSS = 'extern colo_tensor_t loss, d_loss; extern colo_logprob_saved_t saved;'
NAMES = {
    'Bridge': 'extern colo_layout_t from, to;',
    'comm': '''extern colo_status_t status; extern struct ncclComm *nccl; extern int rank, size, local_rank, MPI_COMM_WORLD;
        extern void *user; int cudaSetDevice(int); colo_status_t colo_comm_create_mpi(int, void *, colo_comm_t **);
        colo_status_t all_gather(void *, const void *, void *, size_t);''',
    'A call on a GPU': '''extern void *z; extern colo_logprob_config_t cfg; extern colo_comm_t *self; extern colo_logprob_out_t out;
        extern colo_logprob_saved_t saved; extern colo_logprob_upstream_t upstream;''',
    'Distillation: a target distribution': 'extern colo_tensor_t kl, d_kl, teacher; extern colo_distill_saved_t saved;',
    'Distillation from hidden states': '''extern colo_linear_distill_t *distill; extern colo_lm_head_t *head, *teacher_head;
        extern colo_linear_distill_saved_t saved; extern colo_tensor_t kl, hidden, teacher_hidden, mask, d_hidden, d_weight;
        extern void *buffer; extern double tokens_of_the_batch;''',
    'Grid': '''#define tp tp_comm
        extern colo_hypergrid_t *h; extern colo_grid_t base, view; extern colo_comm_t *tp, *ep, *same; void use(int64_t);''',
    'The same bits for any number of ranks': 'extern colo_logprob_config_t config;',
    'Layout': 'extern colo_grid_t encoder_grid, llm_grid;',
    'lm_head': '''extern colo_lm_head_t *head; extern colo_lm_head_config_t head_config; extern colo_tensor_t logp;
        extern colo_linear_logprob_t *linear; extern colo_linear_logprob_saved_t saved; extern size_t forward_bytes;
        extern void *buffer; extern colo_tensor_t hidden, d_hidden; extern double tokens_of_the_batch;''',
    'The output matrix, resident or sharded': '''extern colo_lm_head_t *head; extern colo_memory_t *memory; extern colo_lm_head_grads_t grads;
        extern colo_tensor_t d_bias;''',
    'loss': LOSS + '''extern colo_tensor_t ids, cu_first_T, cu_last_T, class_weight;
        extern colo_logprob_config_t cfg; extern colo_comm_t *dp_cp_group; extern colo_loss_mean_t mean;
        extern void *mean_workspace; extern colo_loss_mean_upstream_t upstream;''',
    'Packed sequences': 'extern colo_batch_t *batch; extern colo_layout_t layout; extern int64_t lengths[2];',
    'Memory that peers reach': 'extern colo_bridge_config_t config; extern void *arena; extern size_t arena_bytes;',
    'Partition': 'extern colo_tensor_t my_targets;',
    'ragged': '''extern colo_layout_t encoder, llm; extern colo_segments_t *tables, mine; extern colo_comm_t *data_parallel;
        extern colo_batch_t *batch; extern int64_t src_rows, dst_rows;''',
    'Sampling: top-k and top-p': 'extern colo_tensor_t kept;',
    'Sequence': '''extern const int64_t *lengths, *cu; extern colo_comm_t *cp_group;
        extern colo_tensor_t logp, out, d_out, d_logp;''',
    'tape': '''extern colo_tape_t *tape; extern colo_value_t w, out; extern colo_tensor_t weights, d_weights; extern void *state;
        colo_tensor_t matmul(colo_tensor_t, colo_tensor_t); extern colo_backward_fn matmul_backward;''',
    'Top-k, and given columns': 'extern colo_tensor_t logp, d_logp, chosen; extern colo_topk_saved_t saved;',
    'topology': 'extern colo_grid_t grid, order; extern colo_bind_t bind;',
}


def snippets(path):
    """(what NAMES calls the place, code) of each"""
    heading = ''
    for found in re.finditer(r'^##? ([^\n]*)$|^```(\w*)\n(.*?)^```', path.read_text(), re.M | re.S):
        if found[1]:
            heading = found[1].split('\n')[0]
        elif found[2] == 'c':
            yield heading if heading in NAMES else path.stem, found[3]


def complaints_of(compiler, page, code):
    """What the compiler says of a snippet there; "" if nothing"""
    code = re.sub(r'^.*\(…[^;]*;', '', code, flags=re.M)
    if not re.search(r'^\w[^;=]*\)\n\{', code, re.M):
        code = 'int snippet(void);\nint snippet(void)\n{\n%s\nreturn 0;\n}\n' % code
    return complaints(compiler, 'c11', ALL + NAMES.get(page, '') + '\n#line 1\n' + code, '-Wall', '-Wextra', '-Wno-unused',
                      '-Wno-unused-parameter', '-Werror', '-fsyntax-only')


def main(*compiler):
    compilers = [list(compiler)] + [[name] for name in ('gcc', 'clang') if shutil.which(name) and name != compiler[-1]]
    checked = bad = 0
    for each in compilers:
        if complaints_of(each, 'Grid', 'use(1);') or not complaints_of(each, 'Grid', 'use(base.lost);'):
            sys.exit('a planted member that does not exist was not found, or a right line was refused')
    for path in sorted((ROOT / 'docs').rglob('*.md')):
        for where, code in snippets(path):
            if '/mpi.h>' in code:
                continue
            checked += 1
            said = ''.join(complaints_of(each, where, code) for each in compilers)
            if said:
                bad += 1
                print('%s:\n%s%s' % (path.relative_to(ROOT), code, said))
    print('%d snippets, %d bad' % (checked, bad))
    return 1 if bad or not checked else 0


sys.exit(main(*sys.argv[1:]))
