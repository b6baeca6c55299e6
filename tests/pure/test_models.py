"""The jobs that ship, as modules: shapes, first loss, refusals, and what a checkpoint will hold of them."""

import json
import math

import pytest
import torch

from shoal.errors import JobError
from shoal.job import Params, load_job
from shoal.models.digits import Digits
from shoal.models.gpt import GPT

SMALL = {"width": 16, "depth": 2, "heads": 2, "context": 8}


def batch_of(job, dataset, num_samples):
    return job.collate([dataset[i] for i in range(num_samples)])


def build(job):
    torch.manual_seed(job.seed)
    model = job.model()
    return model, job.optimizer(Params(dict(model.named_parameters())))


@pytest.mark.parametrize("job", [Digits(width=4), GPT(**SMALL)], ids=["digits", "gpt"])
def test_data_model_loss_and_metrics_fit_together(job):
    model, optimizer = build(job)
    batch = batch_of(job, job.data(), 3)
    output = model(job.inputs(batch))
    loss = job.loss(output, batch)
    loss.mean().backward()
    optimizer.step()
    assert loss.count == batch[1].numel()
    assert all(p.grad is not None for p in model.parameters())
    accuracy = job.metrics(output, batch)["accuracy"]
    assert accuracy.count == loss.count
    assert accuracy.value == (output.argmax(-1) == batch[1]).sum()


@pytest.mark.parametrize("job", [Digits(), GPT()], ids=["digits", "gpt"])
def test_evaluation_has_no_sample_of_training(job):
    train, test = ({x.numpy().tobytes() for x, _ in data} for data in (job.data(), job.evaluation()))
    assert len(test) > 300
    assert not train & test


@pytest.mark.parametrize(("tied", "tolerance"), [(False, 0.05), (True, 0.5)])
def test_an_untrained_gpt_knows_nothing(tied, tolerance):
    job = GPT(tied=tied)
    model, _ = build(job)
    batch = batch_of(job, job.data(), 8)
    loss = job.loss(model(job.inputs(batch)), batch).mean().detach()
    assert abs(float(loss) - math.log(256)) < tolerance


def test_a_byte_is_predicted_from_those_before_it_alone():
    model, _ = build(GPT(**SMALL))
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 200
    same = (model(tokens) == model(changed)).all(-1)[0].tolist()
    assert same == [True] * 5 + [False] * 3


def test_attention_sees_the_heads_that_its_slice_holds():
    """The first half of the rows of qkv is the first half of the heads: tensor parallelism cuts there."""
    torch.manual_seed(0)
    attention = GPT(**SMALL).model().blocks[0].attention
    x = torch.randn(2, 8, 16)
    whole = attention(x)
    halves = torch.zeros_like(whole)
    weight, bias, out = attention.qkv.weight.data, attention.qkv.bias.data, attention.out.weight.data
    for half in range(2):
        attention.qkv.weight.data, attention.qkv.bias.data = weight.chunk(2)[half], bias.chunk(2)[half]
        attention.out.weight.data = out.chunk(2, dim=1)[half]
        halves += attention(x) - attention.out.bias
    torch.testing.assert_close(halves + attention.out.bias, whole)


def test_tied_embeddings_are_one_parameter():
    tied, untied = (GPT(**SMALL, tied=tied).model() for tied in (True, False))
    assert tied.head.weight is tied.token.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


@pytest.mark.parametrize(
    ("width", "heads", "hint"),
    [(128, 5, "heads=4 or heads=8"), (12, 7, "heads=6 or heads=12"), (128, 0, "heads=1"), (4, 9, "heads=4")],
)
def test_heads_that_do_not_divide_the_width_are_refused_with_those_that_do(width, heads, hint):
    with pytest.raises(JobError, match=hint):
        GPT(width=width, heads=heads).model()


@pytest.mark.parametrize("job", [Digits(width=4, steps=20), GPT(**SMALL, steps=20)], ids=["digits", "gpt"])
def test_the_schedule_goes_on_from_its_json(job):
    def advance(optimizer, scheduler, num_steps):
        rates = []
        for _ in range(num_steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return rates

    _, optimizer = build(job)
    scheduler = job.scheduler(optimizer)
    before = advance(optimizer, scheduler, 8)
    _, resumed = build(job)
    later = job.scheduler(resumed)
    resumed.load_state_dict(optimizer.state_dict())
    later.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    rest = advance(optimizer, scheduler, 12)
    assert advance(resumed, later, 12) == rest
    assert max(before + rest) == pytest.approx(job.lr)
    assert rest[-1] < job.lr / 5


def test_a_sample_continues_the_prompt_and_disturbs_nothing():
    job = GPT(**SMALL, dropout=0.5)
    model, _ = build(job)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    text = job.sample(model, "import ", num_bytes=20)
    assert text.startswith("import ")
    assert text.replace("\n", "").isprintable()
    assert text == job.sample(model, "import ", num_bytes=20)
    assert torch.equal(torch.rand(1), expected)
    assert model.training


def test_a_gpt_shows_its_perplexity_and_a_sample():
    job = GPT(**SMALL)
    shown = job.show(job.model(), {"loss": math.log(7), "accuracy": 0.5})
    assert shown.startswith("perplexity 7.00 of 256\nsample: def ")


@pytest.mark.parametrize(
    ("name", "job"),
    [("digits", Digits(width=8)), ("gpt", GPT(width=8))],
)
def test_built_in_jobs_are_found_by_name(name, job):
    assert load_job(name, {"width": "8"}) == job


def test_digits_learns_in_seconds():
    job = Digits(steps=100)
    model, optimizer = build(job)
    train, test = (batch_of(job, data, len(data)) for data in (job.data(), job.evaluation()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(job.steps):
        rows = torch.randint(len(train[1]), (job.batch_size,), generator=generator)
        batch = [t[rows] for t in train]
        optimizer.zero_grad()
        job.loss(model(job.inputs(batch)), batch).mean().backward()
        optimizer.step()
    accuracy = job.metrics(model.eval()(job.inputs(test)), test)["accuracy"].mean()
    assert accuracy > 0.95
