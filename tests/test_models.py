"""The models: sizes by formula, shapes, weights from the seed, and refusals in one line."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from paceline import models
from paceline.errors import UsageError

DIGITS = (1, 8, 8)
MNIST = (1, 28, 28)
CIFAR = (3, 32, 32)
CONTEXT = 16
VOCABULARY = 31

IMAGE_MODELS = [name for name in models.names() if models.find(name).kind != "text"]
LARGE = {"mlp-wide"}  # left out where a smaller model runs the same code


def build(name: str, input_shape: tuple[int, ...] = DIGITS, classes: int = 10) -> nn.Module:
    if models.find(name).kind == "text":
        return models.build(name, input_shape=(CONTEXT,), classes=VOCABULARY)
    return models.build(name, input_shape=input_shape, classes=classes)


def sample(name: str, *, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    if models.find(name).kind == "text":
        return torch.randint(VOCABULARY, (batch, CONTEXT))
    return torch.randn(batch, *DIGITS, dtype=dtype)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


# ---- sizes: each expectation is arithmetic over the published architecture


def conv_size(kernel: int, inputs: int, outputs: int, *, bias: bool = True) -> int:
    return kernel * kernel * inputs * outputs + (outputs if bias else 0)


def dense_size(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def norm_size(channels: int) -> int:
    return 2 * channels


def mlp_size(*widths: int) -> int:
    return sum(dense_size(inputs, outputs) for inputs, outputs in pairwise(widths))


def resnet_v1_size(n: int, channels: int, classes: int) -> int:
    """Closed form: stage k of width w = 16, 32, 64 has 2n convolutions, one of them w/2 -> w."""
    total = conv_size(3, channels, 16) + norm_size(16)
    total += 2 * n * (conv_size(3, 16, 16) + norm_size(16))
    for w in (32, 64):
        total += (2 * n - 1) * conv_size(3, w, w) + conv_size(3, w // 2, w)
        total += 2 * n * norm_size(w) + conv_size(1, w // 2, w)
    return total + dense_size(64, classes)


def resnet_v2_size(n: int, channels: int, classes: int) -> int:
    """Closed form: a stage is its first block plus n - 1 like blocks."""
    total = conv_size(3, channels, 16) + norm_size(16)
    for inputs, inner, outputs in ((16, 16, 64), (64, 64, 128), (128, 128, 256)):
        tail = conv_size(3, inner, inner) + conv_size(1, inner, outputs) + 2 * norm_size(inner)
        first = conv_size(1, inputs, inner) + conv_size(1, inputs, outputs) + norm_size(inputs)
        other = conv_size(1, outputs, inner) + norm_size(outputs)
        total += n * tail + first + (n - 1) * other
    # The very first block follows the stem's own normalisation and has none in front.
    return total - norm_size(16) + norm_size(256) + dense_size(256, classes)


def densenet_bc_size(layers: int, channels: int, classes: int) -> int:
    """Growth 12. Six layers per block: widths 24 -> 96, halved 48 -> 120, halved 60 -> 132."""
    total = conv_size(3, channels, 24, bias=False)
    width = 24
    for block in range(3):
        inputs = sum(width + 12 * n for n in range(layers))
        total += 2 * inputs + 48 * inputs  # normalisation, 1x1 convolution
        total += layers * (norm_size(48) + conv_size(3, 48, 12, bias=False))
        width += 12 * layers
        if block < 2:
            total += norm_size(width) + conv_size(1, width, width // 2, bias=False)
            width //= 2
    return total + norm_size(width) + dense_size(width, classes)


def transformer_size(context: int, vocabulary: int) -> int:
    """Four layers of width d = 128: 12 d^2 of kernels, 9 d of biases, 4 d of normalisation."""
    d = 128
    # The head shares the embedding's tensor: it adds nothing.
    return (vocabulary + context) * d + 4 * (12 * d * d + 13 * d) + 2 * d


@pytest.mark.parametrize(
    ("name", "input_shape", "expected"),
    [
        ("mlp-128", MNIST, mlp_size(784, 128, 10)),
        ("mlp-128", (64,), mlp_size(64, 128, 10)),
        ("mlp-300-100", MNIST, mlp_size(784, 300, 100, 10)),
        ("mlp-wide", CIFAR, mlp_size(3072, 4096, 2048, 10)),
        ("cnn-small", MNIST, conv_size(3, 1, 32) + mlp_size(32 * 13 * 13, 64, 10)),
        ("cnn-small", DIGITS, conv_size(3, 1, 32) + mlp_size(32 * 3 * 3, 64, 10)),
        (
            "cnn-keras",
            MNIST,
            conv_size(3, 1, 32) + conv_size(3, 32, 64) + mlp_size(64 * 12 * 12, 128, 10),
        ),
        *(
            (f"resnet{6 * n + 2}", shape, resnet_v1_size(n, shape[0], 10))
            for n in (1, 3, 5, 8, 9)
            for shape in (MNIST, CIFAR)
        ),
        ("resnet56v2", CIFAR, resnet_v2_size(6, 3, 10)),
        ("densenet-bc-22-12", MNIST, densenet_bc_size(3, 1, 10)),
        ("densenet-bc-40-12", CIFAR, densenet_bc_size(6, 3, 10)),
        ("densenet-bc-40-12", MNIST, densenet_bc_size(6, 1, 10)),
    ],
)
def test_parameter_count(name: str, input_shape: tuple[int, ...], expected: int) -> None:
    with torch.device("meta"):  # sizes need no memory
        assert count_parameters(build(name, input_shape)) == expected


def test_character_transformer_parameter_count() -> None:
    model = models.build("char-transformer", input_shape=(64,), classes=65)
    assert count_parameters(model) == transformer_size(64, 65)


@pytest.mark.parametrize(
    ("name", "input_shape", "published"),
    [
        ("cnn-small", MNIST, 347_146),
        ("cnn-keras", MNIST, 1_199_882),
        ("resnet50", CIFAR, 760_000),
        ("resnet56", CIFAR, 850_000),
        ("densenet-bc-40-12", CIFAR, 180_000),
    ],
)
def test_parameter_count_is_the_published_one(
    name: str, input_shape: tuple[int, ...], published: int
) -> None:
    with torch.device("meta"):
        count = count_parameters(build(name, input_shape))
    rounded_to = 10_000 if published % 10_000 == 0 else 1
    assert abs(count - published) < rounded_to


@pytest.mark.parametrize(
    ("name", "depth"),
    [("resnet8", 8), ("resnet20", 20), ("resnet56", 56), ("resnet56v2", 56)],
)
def test_depth_counts_the_weighted_layers_on_the_main_path(name: str, depth: int) -> None:
    layers = [
        layer_name
        for layer_name, layer in build(name).named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear) and not layer_name.endswith("shortcut")
    ]
    assert len(layers) == depth


# ---- forward and backward


@pytest.mark.parametrize("input_shape", [DIGITS, MNIST, CIFAR], ids=["8x8", "28x28", "32x32"])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_forward_shape(name: str, input_shape: tuple[int, ...]) -> None:
    model = build(name, input_shape, classes=7).eval()
    with torch.no_grad():
        assert model(torch.randn(2, *input_shape)).shape == (2, 7)


def test_perceptron_takes_a_vector() -> None:
    model = models.build("mlp-128", input_shape=(13,), classes=3)
    assert model(torch.randn(5, 13)).shape == (5, 3)


@pytest.mark.parametrize("side_pixels", [4, 5, 7])
def test_smallest_and_odd_images(side_pixels: int) -> None:
    for name in IMAGE_MODELS:
        if models.find(name).min_side_pixels <= side_pixels and name not in LARGE:
            shape = (2, side_pixels, side_pixels + 1)
            model = build(name, shape, classes=3).eval()
            with torch.no_grad():
                assert model(torch.randn(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("name", [name for name in models.names() if name not in LARGE])
def test_every_parameter_gets_a_finite_gradient_in_float64(name: str) -> None:
    torch.manual_seed(0)
    model = build(name).double()
    logits = model(sample(name, dtype=torch.float64))
    assert logits.dtype == torch.float64
    logits.square().mean().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.dtype == torch.float64
        assert torch.isfinite(parameter.grad).all(), parameter_name


@pytest.mark.parametrize("name", ["resnet20", "resnet56v2", "densenet-bc-40-12"])
def test_normalisation_keeps_a_deep_network_in_range_at_the_start(name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    loss = nn.functional.cross_entropy(model(sample(name, batch=32)), torch.arange(32) % 10)
    assert loss.item() < 3 * math.log(10)


@pytest.mark.parametrize("name", ["mlp-128", "cnn-small", "resnet8", "char-transformer"])
def test_a_few_steps_lower_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    inputs = sample(name, batch=16)
    is_text = models.find(name).kind == "text"
    targets = inputs.flatten() if is_text else torch.arange(16) % 10
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for _ in range(10):
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# ---- first weights


@pytest.mark.parametrize("name", [name for name in models.names() if name not in LARGE])
def test_same_seed_gives_the_same_weights(name: str) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(build(name).state_dict())
    first, again, other = states
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_resnet_kernels_are_he_normal_and_biases_zero() -> None:
    torch.manual_seed(0)
    for name in ("resnet20", "resnet56v2"):
        for layer in build(name).modules():
            if isinstance(layer, nn.Conv2d):
                assert layer.bias is not None
                assert not layer.bias.any()
                if layer.weight.numel() > 2000:
                    expected_std = math.sqrt(2 / layer.weight[0].numel())
                    assert layer.weight.std().item() == pytest.approx(expected_std, rel=0.1)


def test_dropout_acts_in_training_only() -> None:
    for name in ("cnn-keras", "densenet-bc-40-12"):
        model = build(name)
        inputs = sample(name)
        model.eval()
        assert torch.equal(model(inputs), model(inputs))
        model.train()
        assert not torch.equal(model(inputs), model(inputs))


# ---- regularisation


def test_regularization_is_l2_of_the_convolution_kernels() -> None:
    torch.manual_seed(0)
    model = models.build("resnet56v2", input_shape=DIGITS, classes=10).double()
    assert model.l2 == 1e-4
    model.regularization().backward()  # type: ignore[operator]

    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 4:  # convolution kernels alone have four dimensions
            total += parameter.detach().square().sum().item()
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad, 2e-4 * parameter.detach())
        else:
            assert parameter.grad is None, name
    assert model.regularization().item() == pytest.approx(1e-4 * total)  # type: ignore[operator]


def test_other_models_carry_no_regularization() -> None:
    for name in models.names():
        if name != "resnet56v2" and name not in LARGE:
            assert getattr(build(name), "l2", 0.0) == 0.0


# ---- the character transformer


def test_character_transformer_sees_no_later_character() -> None:
    torch.manual_seed(0)
    model = build("char-transformer").eval()
    text = sample("char-transformer")
    with torch.no_grad():
        before = model(text)
        assert before.shape == (2, CONTEXT, VOCABULARY)
        for position in (1, CONTEXT // 2, CONTEXT - 1):
            changed = text.clone()
            changed[:, position:] = (changed[:, position:] + 1) % VOCABULARY
            after = model(changed)
            torch.testing.assert_close(after[:, :position], before[:, :position])
            assert not torch.allclose(after[:, position], before[:, position])


def test_character_transformer_uses_order_and_history() -> None:
    torch.manual_seed(0)
    model = build("char-transformer").eval()
    text = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    with torch.no_grad():
        logits = model(text)
    assert not torch.allclose(logits[0, -1], logits[1, -1])


def test_character_transformer_takes_shorter_text_and_refuses_longer() -> None:
    model = build("char-transformer")
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, VOCABULARY)
    with pytest.raises(UsageError, match="context is 16"):
        model(torch.zeros(1, CONTEXT + 1, dtype=torch.long))


def test_character_transformer_ties_head_and_embedding() -> None:
    model = build("char-transformer")
    for one in (model, copy.deepcopy(model), copy.deepcopy(model).double()):
        names = {name for name, _ in one.named_parameters()}
        assert "characters.weight" in names
        assert "head.weight" not in names
        state = one.state_dict()
        assert state["head.weight"].data_ptr() == state["characters.weight"].data_ptr()


# ---- catalogue and refusals


def test_names() -> None:
    assert models.names() == [
        "mlp-128",
        "mlp-300-100",
        "mlp-wide",
        "cnn-small",
        "cnn-keras",
        "resnet8",
        "resnet20",
        "resnet32",
        "resnet50",
        "resnet56",
        "resnet56v2",
        "densenet-bc-22-12",
        "densenet-bc-40-12",
        "char-transformer",
    ]


def test_every_description_is_one_line() -> None:
    for name in models.names():
        description = models.find(name).description
        assert description
        assert "\n" not in description


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown model 'resnet-20'; did you mean 'resnet20'\?"):
        models.build("resnet-20", input_shape=CIFAR, classes=10)


@pytest.mark.parametrize(
    ("name", "input_shape", "classes", "words"),
    [
        ("cnn-small", (784,), 10, ["(784,)", "(channels, height, width)", "mlp-128"]),
        ("resnet20", (28, 28), 10, ["(28, 28)", "(channels, height, width)"]),
        ("char-transformer", MNIST, 10, ["(1, 28, 28)", "(time,)", "cnn-small"]),
        ("cnn-small", (1, 3, 8), 10, ["(1, 3, 8)", "at least 4"]),
        ("cnn-keras", (1, 5, 5), 10, ["(1, 5, 5)", "at least 6"]),
        ("densenet-bc-40-12", (1, 3, 3), 10, ["(1, 3, 3)", "at least 4"]),
        ("mlp-128", (), 10, ["()", "without the batch dimension"]),
        ("mlp-128", (0,), 10, ["(0,)", "at least 1"]),
        ("mlp-128", (4,), 0, ["classes=0", "at least 1"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    name: str, input_shape: tuple[int, ...], classes: int, words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        models.build(name, input_shape=input_shape, classes=classes)
    text = str(caught.value)
    assert "\n" not in text
    assert repr(name) in text
    for word in words:
        assert word in text


def test_catalogue_and_refusals_work_without_torch() -> None:
    script = """
import sys
from paceline import models
from paceline.errors import UsageError
models.names()
try:
    models.build("cnn-small", input_shape=(784,), classes=10)
except UsageError:
    pass
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
