#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""GRPO by TRL, with log-probabilities and entropies of colobridge: a small Llama of random weights learns to answer in even numbers.

usage: python examples/rl/grpo.py [--steps 40] [--compare]
       torchrun --nproc-per-node 2 examples/rl/grpo.py

--compare: steps with TRL's own function, too, from the same weights and random numbers; exit status 1: the losses, rewards or
gradient norms differ. Needs TRL 1.16; downloads nothing.
"""
import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault('HF_HUB_OFFLINE', '1')

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers as hf  # noqa: E402
import trl  # noqa: E402
import trl.trainer.utils  # noqa: E402

if __name__ == '__main__':
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / 'python')]
from colobridge.compat import ChunkedLogProbFunction  # noqa: E402

WORDS = ['<pad>', '<end>', '<unk>', *map(str, range(40))]
THEIRS = trl.trainer.utils._ChunkedLogProbFunction


def tokenizer():
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token='<unk>'))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token='<pad>', eos_token='<end>', unk_token='<unk>')


def reward(completions, **_more):
    """The share of even numbers among the words of each completion"""
    words = [text.split() for text in completions]
    return [sum(word.isdigit() and int(word) % 2 == 0 for word in some) / max(len(some), 1) for some in words]


def trained(function, steps, out):
    """What the trainer logged in each step"""
    trl.trainer.utils._ChunkedLogProbFunction = function  # the one line that changes: of all trainers in this process
    hf.set_seed(1)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None))
    trainer = trl.GRPOTrainer(
        model, reward_funcs=reward, processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list([{'prompt': '%d %d' % (i, (7 * i + 3) % 40)} for i in range(40)]),
        args=trl.GRPOConfig(
            output_dir=out, max_steps=steps, per_device_train_batch_size=16, num_generations=8, max_completion_length=8,
            temperature=0.9, learning_rate=3e-3, logging_steps=1, report_to=[], save_strategy='no', disable_tqdm=True,
            bf16=False, use_cpu=True, dataloader_pin_memory=False, gradient_checkpointing=False, seed=1))
    trainer.remove_callback(hf.trainer_callback.PrinterCallback)
    trainer.train()
    return [entry for entry in trainer.state.log_history if 'reward' in entry]


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument('--steps', type=int, default=40)
    p.add_argument('--compare', action='store_true')
    o = p.parse_args(argv)
    with tempfile.TemporaryDirectory() as out:
        ours = trained(ChunkedLogProbFunction, o.steps, out)
        plain = trained(THEIRS, o.steps, out) if o.compare else ours
    for step, (a, b) in enumerate(zip(ours, plain, strict=True)):
        for name in ('loss', 'reward', 'grad_norm', 'entropy'):
            if abs(a[name] - b[name]) > 1e-4 * max(abs(b[name]), 1.0):  # logged in f32, and each step begins where the last ended
                raise SystemExit('step %d: %s is %g, of TRL %g' % (step, name, a[name], b[name]))
        if os.environ.get('RANK', '0') == '0' and step % 5 == 0:
            print('step %2d  reward %.3f  entropy %.3f' % (step, a['reward'], a['entropy']))
    return [entry['reward'] for entry in ours]


if __name__ == '__main__':
    main()
