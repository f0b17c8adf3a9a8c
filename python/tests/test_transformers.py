# SPDX-License-Identifier: Apache-2.0
"""compat.fuse_lm_head() against the losses of transformers' own models, with random weights: values, gradients, what comes
out besides, refusals. Skipped where transformers is not installed; trainers are in test_trainers.py."""
import copy
import inspect
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers', minversion='5')

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'examples/vlm'))

import vlm  # noqa: E402
from colobridge import compat  # noqa: E402
from world import needs_fsdp2  # noqa: E402

V = 97
SIZES = dict(vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
             head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GPT2 = dict(vocab_size=V, n_embd=16, n_head=2, n_layer=2, n_positions=64)
# model: (config, options, what fuse_lm_head() finds). GPT-2's head is tied, Phi's has a bias.
MODELS = {
    'Llama': ('LlamaConfig', {}, (1.0, None)),
    'Gemma2': ('Gemma2Config', {'final_logit_softcapping': 3.0}, (1.0, 3.0)),
    'Cohere': ('CohereConfig', {'logit_scale': 0.3}, (0.3, None)),
    'Granite': ('GraniteConfig', {'logits_scaling': 3.0}, (1 / 3.0, None)),
    'GPT2': ('GPT2Config', GPT2, (1.0, None)),
    'Phi': ('PhiConfig', {}, (1.0, None)),
    'Mixtral': ('MixtralConfig', {'num_local_experts': 4, 'num_experts_per_tok': 2}, (1.0, None)),
}


def made(name, seed=0, **options):
    config, more, _ = MODELS.get(name, (name + 'Config', {}, None))
    kind = getattr(transformers, name + ('LMHeadModel' if name in ('GPT2', 'Bert') else 'ForCausalLM'), None)
    if kind is None:
        pytest.skip('this transformers has no ' + name)
    torch.manual_seed(seed)
    model = kind(getattr(transformers, config)(**{**(SIZES if name != 'GPT2' else {}), **more, **options})).eval()
    with torch.no_grad():  # logits of some size, so that a cap is seen
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return model


def batch(seed=1):
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, V, (2, 9), generator=rng)
    labels = ids.clone()
    labels[0, :4] = -100
    return {'input_ids': ids, 'labels': labels}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alike(found, wanted, bound=2e-6):
    """(loss, gradients): f32, each is a sum of 16 tokens' terms in another order"""
    (loss, grads), (want, d_want) = found, wanted
    assert abs(float(loss) - float(want)) <= bound * abs(float(want))
    assert grads.keys() == d_want.keys()
    largest = max(float(g.abs().max()) for g in d_want.values())
    for name, g in d_want.items():
        assert float((grads[name] - g).abs().max()) <= bound * max(float(g.abs().max()), 1e-2 * largest), name


def both(name, kwargs, **options):
    """(loss, gradients) of ours and of theirs"""
    theirs, ours = made(name), made(name)
    compat.fuse_lm_head(ours, **options)
    out = []
    for model in (ours, theirs):
        loss = model(**kwargs).loss
        out.append((loss.detach(), gradients(model, loss)))
    return out


@pytest.mark.parametrize('name', MODELS)
def test_losses_and_gradients_are_those_of_the_model(name):
    given = batch()
    alike(*both(name, given))
    alike(*both(name, dict(given, num_items_in_batch=torch.tensor(29))))
    model = made(name)
    compat.fuse_lm_head(model)
    scale, softcap = MODELS[name][2]
    found = model._colobridge_fused.options
    assert found['scale'] == pytest.approx(scale, rel=2e-7) and found['softcap'] == (softcap and pytest.approx(softcap, rel=2e-7))


@pytest.mark.parametrize('more', (
    {'num_items_in_batch': 7}, {'ignore_index': 5}, {'shift_labels': torch.arange(18).reshape(2, 9) % 11 - 1},
    {'attention_mask': torch.tensor([[0] * 3 + [1] * 6, [1] * 9])}, {'use_cache': True}))
def test_what_a_caller_may_pass_besides(more):
    given = batch()
    if 'shift_labels' in more:
        more['shift_labels'][more['shift_labels'] < 0] = -100
    if 'ignore_index' in more:
        given['labels'] = given['labels'].masked_fill(given['labels'] < 0, 5)
    alike(*both('Llama', dict(given, **more)))


def test_logits_do_not_exist_with_labels_and_are_as_before_without():
    model, given, calls = made('Gemma2'), batch(), []
    wanted = model(**given)
    compat.fuse_lm_head(model)
    model.lm_head.register_forward_hook(lambda *_of: calls.append(0))
    out = model(**given, output_hidden_states=True)
    assert not calls and out.logits is None and type(out) is type(wanted) and len(out.hidden_states) == 3
    loss, *_ = model(given['input_ids'], None, labels=given['labels'], return_dict=False)
    assert float(loss) == float(out.loss) and not calls
    with torch.no_grad():
        assert float(model(**given).loss) == pytest.approx(float(wanted.loss), rel=2e-6) and not calls
    assert torch.equal(model(given['input_ids']).logits, wanted.logits) and calls
    assert model(**given, logits_to_keep=9).logits.shape == wanted.logits.shape
    assert model.generate(given['input_ids'], max_new_tokens=2, do_sample=False).shape == (2, 11)


@pytest.mark.parametrize('valid, bound', ((0, None), (1, 10), (10, 10), (11, 20), (159, 160), (160, 160)))
def test_products_have_rows_for_the_labels_that_count(valid, bound, monkeypatch):
    model, theirs, seen = made('Llama'), made('Llama'), []
    compat.fuse_lm_head(model)
    ids = torch.randint(3, V, (4, 40), generator=torch.Generator().manual_seed(3))
    shift = torch.full((160,), -100).index_copy(0, torch.randperm(160)[:valid], ids.reshape(-1)[:valid]).reshape(4, 40)
    own = compat.transformers.linear_cross_entropy
    monkeypatch.setattr(compat.transformers, 'linear_cross_entropy', lambda hidden, head, *of, **more: seen.append(head.max_valid) or own(
        hidden, head, *of, **more))
    given = {'input_ids': ids, 'labels': ids, 'shift_labels': shift, 'num_items_in_batch': 160}
    loss, wanted = model(**given).loss, theirs(**given).loss
    assert seen == [bound]
    if valid:
        alike((loss.detach(), gradients(model, loss)), (wanted.detach(), gradients(theirs, wanted)))
    else:
        assert float(loss.detach()) == 0.0


@pytest.mark.parametrize('items', (None, torch.tensor(29)))
def test_label_smoothing_is_that_of_the_trainer(items):
    from transformers.trainer_pt_utils import LabelSmoother
    theirs, ours, given = made('Llama'), made('Llama'), batch()
    compat.fuse_lm_head(ours, label_smoothing=0.2)
    logits = {'logits': theirs(given['input_ids']).logits}
    more = {} if items is None else {'num_items_in_batch': items}
    if items is not None and 'num_items_in_batch' not in inspect.signature(LabelSmoother.__call__).parameters:
        pytest.skip('this LabelSmoother divides by the tokens of the batch')
    wanted = LabelSmoother(epsilon=0.2)(logits, given['labels'], shift_labels=True, **more)
    loss = ours(**given, **more).loss
    alike((loss.detach(), gradients(ours, loss)), (wanted.detach(), gradients(theirs, wanted)))


def test_gradient_checkpointing_accumulation_and_autocast():
    given, more = batch(), batch(2)
    theirs, ours = made('Llama'), made('Llama')
    compat.fuse_lm_head(ours)
    ours.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
    found = []
    for model in (ours, theirs):
        losses = [model(**of, num_items_in_batch=30).loss for of in (given, more)]
        found.append((sum(loss.detach() for loss in losses), gradients(model, sum(losses))))
    alike(*found)
    found = []
    for model in (ours, theirs):
        with torch.autocast('cpu', dtype=torch.bfloat16):
            loss = model(**given).loss
        found.append((loss.detach(), gradients(model, loss)))
    alike(*found, bound=0.03)  # theirs rounds logits and their gradients to bf16, ours gradients alone


def test_a_graph_has_all_of_it():
    if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 14):
        pytest.skip('linear_cross_entropy() breaks the graphs of this PyTorch')
    theirs, ours, given = made('Llama'), made('Llama'), batch()
    compat.fuse_lm_head(ours)
    loss, wanted = torch.compile(ours, backend='aot_eager', fullgraph=True)(**given).loss, theirs(**given).loss
    alike((loss.detach(), gradients(ours, loss)), (wanted.detach(), gradients(theirs, wanted)))


def test_a_model_that_reads_images():
    if not hasattr(transformers, 'LlavaConfig'):
        pytest.skip('this transformers has no Llava')
    vision = transformers.CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                           image_size=8, patch_size=4)
    found, given = [], batch()
    given['input_ids'][:, 1:5] = 90
    given['labels'][:, :5] = -100
    for fuse in (True, False):
        torch.manual_seed(0)
        model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
            vision_config=vision, text_config=transformers.LlamaConfig(**SIZES), image_token_index=90, image_token_id=90,
            vision_feature_layer=-1, vision_feature_select_strategy='default'))
        if fuse:
            compat.fuse_lm_head(model)
        out = model(**given, pixel_values=torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4)))
        assert (out.logits is None) == fuse
        found.append((out.loss.detach(), gradients(model, out.loss)))
    assert any('vision' in name for name in found[0][1])
    alike(*found)


def test_a_head_of_zero_3_is_refused():
    model = made('Llama')
    compat.fuse_lm_head(model)
    model.lm_head.weight.ds_tensor = model.lm_head.weight
    with pytest.raises(ValueError, match='ZeRO-3'):
        model(**batch())


def test_it_is_undone():
    model, given = made('Llama'), batch()
    undo = compat.fuse_lm_head(model)
    with pytest.raises(ValueError, match='fused already'):
        compat.fuse_lm_head(model)
    assert inspect.signature(model.forward) == inspect.signature(made('Llama').forward)  # Trainer asks it what to pass
    wrapped = model.forward
    model.forward = lambda *args, **kwargs: wrapped(*args, **kwargs)  # as accelerate does
    undo()
    assert model(**given).logits is not None and model(given['input_ids']).logits is not None
    again = compat.fuse_lm_head(model)
    assert model(**given).logits is None and model(given['input_ids']).logits is not None
    again()
    assert model(**given).logits is not None
    model = made('Llama')
    compat.fuse_lm_head(model)()
    assert 'forward' not in vars(model) and model(**given).logits is not None
    compat.fuse_lm_head(model)
    assert model(**given).logits is None


def test_a_copy_has_a_loss_of_its_own():
    model, given = made('Llama'), batch()
    undo = compat.fuse_lm_head(model)
    twin = copy.deepcopy(model)
    undo()
    with torch.no_grad():
        twin.lm_head.weight.mul_(4)
    out = twin(**given)
    assert out.logits is None and model(**given).logits is not None
    gradients(twin, out.loss)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(twin(given['input_ids']).logits, 4 * model(given['input_ids']).logits)


def test_adapters_of_peft():
    peft = pytest.importorskip('peft')
    given = batch()
    lora = dict(r=2, init_lora_weights=False, task_type='CAUSAL_LM')
    # the head is no target: base and adapter have gradients as without
    found = []
    for fuse in (True, False):
        torch.manual_seed(5)
        model = peft.get_peft_model(made('Llama'), peft.LoraConfig(target_modules=['q_proj'], modules_to_save=['lm_head'], **lora))
        if fuse:
            compat.fuse_lm_head(model)
        out = model(**given)
        assert (out.logits is None) == fuse
        found.append((out.loss.detach(), gradients(model, out.loss)))
    assert any('lm_head' in name for name in found[1][1])
    alike(*found)
    # the head is one, fused before or after
    found = []
    for fuse in ('before', 'after', 'not'):
        torch.manual_seed(5)
        model = made('Llama')
        if fuse == 'before':
            compat.fuse_lm_head(model)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=['q_proj', 'lm_head'], **lora))
        if fuse == 'after':
            compat.fuse_lm_head(model)
        out = model(**given)
        assert (out.logits is None) == (fuse != 'not')
        found.append((out.loss.detach(), gradients(model, out.loss)))
    assert any('lm_head.lora_A' in name for name in found[2][1])
    alike(found[0], found[2]), alike(found[1], found[2])
    dropping = peft.get_peft_model(made('Llama').train(), peft.LoraConfig(target_modules=['lm_head'], lora_dropout=0.1, **lora))
    with pytest.raises(ValueError, match='drops out hidden states'):
        compat.fuse_lm_head(dropping)


def capped_otherwise(model):
    model.lm_head.register_forward_hook(lambda _module, _args, z: z.clamp(-4, 4))
    return model


def with_another_loss(model):
    model.loss_function = lambda logits, labels, **_more: logits.square().mean()
    return model


def unshifted(model):
    model.loss_function = lambda logits, labels, **_more: torch.nn.functional.cross_entropy(logits.reshape(-1, V), labels.reshape(-1))
    return model


@pytest.mark.parametrize('model, why', (
    (lambda: made('MiniCPM3', q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8),
     'does not get what base_model returns'),  # it divides hidden states, not logits
    (lambda: made('Bert', is_decoder=True), 'does not get what base_model returns'),  # a layer between them
    (lambda: capped_otherwise(made('Llama')), 'neither scale nor softcap'),
    (lambda: with_another_loss(made('Llama')), 'its loss is'),
    (lambda: unshifted(made('Llama')), 'its loss is'),
    (lambda: made('Llama').to('meta'), 'meta device'),
    (lambda: made('Llama').model, 'no lm_head'),
    (lambda: torch.nn.Linear(2, 3), 'no lm_head')))
def test_what_cannot_be_fused_is_refused(model, why):
    model = model()
    before = {name: len(m._forward_hooks) for name, m in model.named_modules()}
    with pytest.raises(ValueError, match=why):
        compat.fuse_lm_head(model)
    assert 'forward' not in vars(model) and before == {name: len(m._forward_hooks) for name, m in model.named_modules()}


def test_a_loss_of_the_router_is_refused():
    model = made('Mixtral')
    compat.fuse_lm_head(model)
    with pytest.raises(ValueError, match='router'):
        model(**batch(), output_router_logits=True)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match='router'):
        model(**batch())


def test_random_numbers_stay_as_they_were():
    model = made('Llama', attention_dropout=0.5).train()
    torch.manual_seed(9)
    wanted = torch.rand(3)
    torch.manual_seed(9)
    compat.fuse_lm_head(model)
    assert torch.equal(torch.rand(3), wanted) and model.training


PAGE = Path(__file__).resolve().parents[2] / 'docs/guides/transformers.md'


def snippets():
    """The page's, by its headings"""
    parts = re.split(r'^## (.*)\n', '## first\n' + PAGE.read_text(), flags=re.M)[1:]
    return {name: re.findall(r'```python\n(.*?)```', text, re.S) for name, text in zip(parts[::2], parts[1::2])}


def run(code, **names):
    exec(compile(code, str(PAGE), 'exec'), names)
    return names


def test_the_lines_of_the_page():
    given, parts = batch(), snippets()
    assert {name: len(codes) for name, codes in parts.items() if codes} == {
        'first': 1, 'Who divides': 1, 'Label smoothing': 1, 'Adapters of peft': 1, 'TRL': 1}
    model, theirs = made('Qwen3', tie_word_embeddings=True), made('Qwen3', tie_word_embeddings=True)
    names = run(parts['first'][0], model=model, ids=given['input_ids'], labels=given['labels'])
    loss = theirs(**given).loss
    alike((names['loss'].detach(), {name: p.grad for name, p in model.named_parameters()}), (loss.detach(), gradients(theirs, loss)))
    names['undo']()
    run(parts['Label smoothing'][0], model=model, fuse_lm_head=compat.fuse_lm_head)
    loss = torch.nn.functional.cross_entropy(theirs(given['input_ids']).logits[:, :-1].reshape(-1, V), given['labels'][:, 1:].reshape(-1),
                                             label_smoothing=0.1)
    torch.testing.assert_close(model(**given).loss, loss, rtol=2e-6, atol=0)
    peft = pytest.importorskip('peft')
    names = run(parts['Adapters of peft'][0], model=made('Llama'), peft=peft, fuse_lm_head=compat.fuse_lm_head)
    assert names['model'](**given).logits is None


def divided(rank):
    """Each rank's own gradients of the page's loop, of the unwrapped model's loss, and those of all tokens at once"""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    theirs, ours = made('Llama'), made('Llama')
    compat.fuse_lm_head(ours)
    given = [batch(5), batch(6)]
    given[0]['labels'][1, :7] = -100
    ddp, mine = DistributedDataParallel(ours), given[rank]
    run(snippets()['Who divides'][0], torch=torch, ddp=ddp, ids=mine['input_ids'], labels=mine['labels'])
    reduced = {name: p.grad.clone() for name, p in ours.named_parameters()}
    whole = {name: torch.cat([part[name] for part in given]) for name in given[0]}
    wanted = gradients(theirs, theirs(**whole).loss)
    alike((1.0, reduced), (1.0, wanted))
    alone = gradients(ours, ddp.module(**mine).loss)['lm_head.weight']  # as a compute_loss with unwrap_model() does
    other = [torch.empty_like(alone) for _ in range(2)]
    dist.all_gather(other, alone)
    assert not torch.equal(*other)


def test_a_loop_of_ones_own_under_ddp(pair):
    pair.run(divided)


def example(rank, *more):
    vlm.main(['--steps', '2', '--batch', '4', *more])
    forward = vlm.Ours.forward
    with mock.patch.object(vlm.Ours, 'forward', lambda self, pixel_values, **given: forward(self, pixel_values=pixel_values * 1.01, **given)):
        with pytest.raises(SystemExit, match='differ'):
            vlm.main(['--steps', '1', '--batch', '4', *more])


def test_the_notebook_of_a_model_that_reads_images_runs():
    nbclient, nbformat = pytest.importorskip('nbclient'), pytest.importorskip('nbformat')
    pytest.importorskip('ipykernel')
    folder = Path(vlm.__file__).parent
    done = nbclient.NotebookClient(nbformat.read(folder / 'vlm.ipynb', 4), timeout=250, resources={
        'metadata': {'path': str(folder)}}).execute()
    said = ''.join(out.get('text', '') for cell in done.cells if cell.cell_type == 'code' for out in cell.outputs)
    assert re.search(r'loss (\d\.\d{4})\d*, plain \1\d*; gradients differ by', said), said


@pytest.mark.parametrize('more', ((), ('--fsdp',)))
def test_the_example_of_a_model_that_reads_images(more, pair):
    if more:
        needs_fsdp2(pair)
    pair.run(example, *more)
