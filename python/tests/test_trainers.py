# SPDX-License-Identifier: Apache-2.0
"""Trainers of transformers and TRL on models with random weights: a step with our loss against one with their own. Losses and
gradients, on one process, under DDP and under FSDP2. Skipped where a package is missing."""
import contextlib
import os
import sys
from pathlib import Path
from unittest import mock

os.environ.setdefault('HF_HUB_OFFLINE', '1')  # read when it is imported

import pytest  # noqa: E402

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers', minversion='5')
trl = pytest.importorskip('trl', minversion='1.16')
pytest.importorskip('accelerate')
datasets = pytest.importorskip('datasets')

import tokenizers  # noqa: E402
import trl.trainer.utils  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'examples/rl'))

import grpo  # noqa: E402
from colobridge import compat  # noqa: E402
from world import needs_fsdp2  # noqa: E402

WORDS = ['<pad>', '<s>', '</s>', '<unk>'] + ['w%d' % i for i in range(60)]
THEIRS = trl.trainer.utils._ChunkedLogProbFunction
TRAINERS = {'sft': (trl.SFTTrainer, trl.SFTConfig, {'max_length': 32}),
            'dpo': (trl.DPOTrainer, trl.DPOConfig, {'max_length': 32, 'use_weighting': True}),  # asks for all outputs
            'kto': (trl.KTOTrainer, trl.KTOConfig, {'max_length': 32}),
            'grpo': (trl.GRPOTrainer, trl.GRPOConfig, {'num_generations': 2, 'max_completion_length': 6, 'temperature': 0.7, 'beta': 0.1}),
            'rloo': (trl.RLOOTrainer, trl.RLOOConfig, {'num_generations': 2, 'max_completion_length': 6, 'temperature': 0.7, 'beta': 0.1})}


def tokenizer():
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token='<unk>'))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token='<pad>', bos_token='<s>', eos_token='</s>',
                                                unk_token='<unk>')


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """Folders of a model with a head of its own and of one whose head is tied; trainers read reference models from there."""
    path = tmp_path_factory.mktemp('models')
    for tied in (False, True):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            initializer_range=0.2, tie_word_embeddings=tied)).save_pretrained(path / str(tied))
    return path


def words(i, n):
    return ' '.join('w%d' % ((7 * i + 3 * j * j) % 60) for j in range(n))


def row(kind, i):
    """Of a data set. Lengths differ, so that micro-batches and ranks have other numbers of tokens."""
    prompt, some = words(i, 4), {'completion': ' ' + words(i + 50, 2 + i % 5)}
    if kind == 'trainer':
        ids = tokenizer()(words(i, 4 + i % 5))['input_ids']
        return {'input_ids': ids, 'labels': [-100] * 2 + ids[2:], 'attention_mask': [1] * len(ids)}
    return {'prompt': prompt, **({
        'sft': some, 'kto': {**some, 'label': bool(i % 2)},
        'dpo': {'chosen': some['completion'], 'rejected': ' ' + words(i + 9, 3)}}.get(kind, {}))}


def reward(completions, **_more):
    return [float(sum(map(ord, text)) % 7) for text in completions]


class Kept(transformers.TrainerCallback):
    """The gradients of a step"""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_more):
        self.gradients = {name: getattr(p.grad, 'full_tensor', p.grad.clone)().detach() for name, p in model.named_parameters()
                          if p.grad is not None}


def step(kind, path, out, ours, shard=None, late=False):
    """(loss, gradients) of a step of two micro-batches. shard(model): in the place of DDP; late: the model is fused after it"""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    transformers.set_seed(3)
    model, kept, asked, calls = transformers.LlamaForCausalLM.from_pretrained(path), Kept(), [], []
    model.lm_head.register_forward_hook(lambda *_of: calls.append(0))
    fuse = [compat.fuse_lm_head] * (ours and kind == 'trainer')
    for fn in [shard, *fuse] if late else [*fuse, shard]:
        if fn is not None:
            fn(model)
    calls.clear()
    common = dict(output_dir=str(out), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1,
                  learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True, save_strategy='no', optim='sgd',
                  max_grad_norm=0, seed=3, disable_tqdm=True, bf16=False, dataloader_pin_memory=False,
                  gradient_checkpointing=kind in ('trainer', 'dpo'))
    data = datasets.Dataset.from_list([row(kind, i) for i in range(16)])

    class Function:
        @staticmethod
        def apply(*of):
            asked.append(of[-1])
            return compat.ChunkedLogProbFunction.apply(*of)
    with mock.patch('trl.trainer.utils._ChunkedLogProbFunction', Function if ours else THEIRS), contextlib.ExitStack() as stack:
        if shard is not None:
            stack.enter_context(mock.patch.object(Accelerator, 'prepare_model', lambda self, given, **_more: given))
        if kind == 'trainer':
            trainer = transformers.Trainer(
                model, transformers.TrainingArguments(**common), train_dataset=data, callbacks=[kept],
                data_collator=transformers.DataCollatorForSeq2Seq(tokenizer(), padding=True))
        else:
            of, config, more = TRAINERS[kind]
            rewards = {'reward_funcs': reward} if 'num_generations' in more else {}
            trainer = of(model, args=config(**common, **more), train_dataset=data, processing_class=tokenizer(),
                         callbacks=[kept], **rewards)
        torch.manual_seed(11 + int(os.environ.get('RANK', 0)))
        trainer.train()
    assert bool(asked) == (ours and kind != 'trainer')
    assert kind != 'trainer' or len(calls) == (0 if ours else 2)
    assert kind != 'dpo' or not ours or any('log_sum_sq_probs' in outputs for outputs in asked)
    assert any(bool(g.any()) for g in kept.gradients.values())
    return [entry['loss'] for entry in trainer.state.log_history if 'loss' in entry][0], kept.gradients


def compared(kind, path, out, *how):
    """2e-6 of the largest of a gradient: f32, with sums of up to 40 tokens in another order"""
    (want, d_want), (loss, grads) = (step(kind, path, out, ours, *how) for ours in (False, True))
    assert abs(loss - want) <= 2e-6 * max(abs(want), 0.1), (loss, want)
    assert grads.keys() == d_want.keys()
    for name, g in d_want.items():
        assert float((grads[name] - g).abs().max()) <= 2e-6 * float(g.abs().max()), name


@pytest.mark.parametrize('kind', ('trainer', *TRAINERS))
def test_a_step_is_that_of_the_trainer(kind, saved, tmp_path):
    compared(kind, saved / str(kind == 'sft'), tmp_path)


def on_ranks(rank, kind, path, out):
    compared(kind, path, out)


@pytest.mark.parametrize('kind', ('trainer', *TRAINERS))
def test_under_ddp(kind, saved, tmp_path, pair):
    pair.run(on_ranks, kind, saved / str(kind == 'trainer'), tmp_path)


def sharded(rank, kind, path, out, tail):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh('cpu', (2,))

    def shard(model):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        if tail == 'head':
            fully_shard(model.lm_head, mesh=mesh)
        if tail == 'norm and head':  # as accelerate does
            fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
    compared(kind, path, out, shard, tail == 'root')


@pytest.mark.parametrize('kind, tail, tied', (('trainer', 'head', False), ('trainer', 'norm and head', False), ('trainer', 'root', True),
                                              ('sft', 'norm and head', False), ('dpo', 'root', True)))
def test_under_fsdp2(kind, tail, tied, saved, tmp_path, pair):
    needs_fsdp2(pair)
    pair.run(sharded, kind, saved / str(tied), tmp_path, tail)


def test_the_lines_of_the_page(saved, tmp_path):
    from test_transformers import run, snippets
    with mock.patch('trl.trainer.utils._ChunkedLogProbFunction', THEIRS):
        names = run(snippets()['TRL'][0], model=transformers.LlamaForCausalLM.from_pretrained(saved / 'False'), tokenizer=tokenizer(),
                    args=trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1, save_strategy='no', bf16=False),
                    data=datasets.Dataset.from_list([row('sft', i) for i in range(8)]))
        assert trl.trainer.utils._ChunkedLogProbFunction is compat.ChunkedLogProbFunction
        names['trainer'].train()
    assert names['trainer'].state.global_step == 1


def example(rank):
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    with mock.patch('trl.trainer.utils._ChunkedLogProbFunction', THEIRS):
        grpo.main(['--steps', '3', '--compare'])

        class Wrong(compat.ChunkedLogProbFunction):
            @staticmethod
            def apply(*of):
                logp, entropy, *more = compat.ChunkedLogProbFunction.apply(*of)
                return (1.01 * logp, entropy, *more)
        with mock.patch.object(grpo, 'ChunkedLogProbFunction', Wrong), pytest.raises(SystemExit, match='of TRL'):
            grpo.main(['--steps', '1', '--compare'])


def test_the_example_of_grpo(pair):
    pair.run(example)
