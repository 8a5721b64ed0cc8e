"""Every table and figure of the published studies: our table or figure, or why there is none."""

from dataclasses import dataclass

NOT_LEGIBLE = "its values are not legible"


@dataclass(frozen=True)
class PublishedItem:
    """A table or figure, matched by one of ours or omitted."""

    study: str
    name: str
    content: str
    ours: str = ""
    """The heading of ours; empty if it is omitted."""
    reason: str = ""
    """Why it is omitted, or what of it is missing."""


def _items(study: str, *rows: tuple[str, str, str, str]) -> tuple[PublishedItem, ...]:
    return tuple(PublishedItem(study, *row) for row in rows)


ITEMS = (
    *_items(
        "switch",
        ("table 5.1", "ResNet: accuracy, loss, time", "ResNet on CIFAR-10", ""),
        ("table 5.2", "DenseNet: accuracy, loss, time", "DenseNet-BC ... on Fashion-MNIST", ""),
        (
            "figures 5.1, 5.2, 5.6, 5.7",
            "accuracy and loss of training and validation by epoch",
            "Accuracy and loss, by epochs and by seconds",
            f"published curves are not drawn: {NOT_LEGIBLE}",
        ),
        ("figures 5.3, 5.8", "CPU of the cluster", "Cluster monitor; CPU per machine", ""),
        ("figures 5.4, 5.9", "network of the cluster", "Cluster monitor; network per machine", ""),
        (
            "figures 5.5, 5.10",
            "memory of the cluster",
            "Cluster monitor; memory per machine",
            "share, buffer, swap and total of the plots are not compared",
        ),
    ),
    *_items(
        "ps-allreduce",
        ("tables 1 to 12", "accuracy by epoch", "accuracy by epoch", ""),
        ("tables 13, 16", "means of CPU, memory, network", "CPU, memory and network", ""),
        (
            "tables 14, 15, 17, 18",
            "test accuracy and seconds of a strategy and batch",
            "mnist, fashion_mnist, kmnist: published and here",
            "the same numbers as in tables 19 to 21, in another order",
        ),
        (
            "tables 19 to 21",
            "test accuracy and seconds of a network",
            "mnist, fashion_mnist, kmnist: published and here",
            "",
        ),
        (
            "figures 16-18, 27-29, 39-41, 50-52, 62-64, 73-75",
            "bars of means",
            "CPU, memory and network; bars of seconds",
            "",
        ),
        (
            "figures 19-26, 30-37, 42-49, 53-60, 65-72, 76-83",
            "CPU, memory, network and load over time",
            "Machines over time; minimum and maximum in the table of resources",
            "published lines are not legible, only their minimum and maximum; no values of load",
        ),
    ),
    *_items(
        "spark-tensorflow",
        ("figures 5.1, 5.24", "training time by batch", "Seconds by batch", NOT_LEGIBLE),
        ("figures 5.2, 5.25", "time of a step by batch", "Ms/step by batch", NOT_LEGIBLE),
        (
            "figures 5.3, 5.26",
            "reading and evaluating the test set",
            "time by batch (columns read, evaluate)",
            f"evaluation is 0 at --scale small without test rows; {NOT_LEGIBLE}",
        ),
        ("tables 5.1 to 5.4, 5.15 to 5.18", "memory and CPU", "memory and CPU", ""),
        (
            "figures 5.4-5.23, 5.27-5.42",
            "memory and CPU over time by batch",
            "Machines over time",
            NOT_LEGIBLE,
        ),
        ("tables 5.5 to 5.9, 5.19 to 5.22", "operators", "self time by category", ""),
        ("tables 5.10, 5.23", "category Dataset", "ratios of input, exchange and optimizer", ""),
        ("tables 5.11, 5.24", "batch preparation", "ratios of input, exchange and optimizer", ""),
        (
            "tables 5.12, 5.13, 5.25, 5.26",
            "all-reduce, first and corrected",
            "ratios of input, exchange and optimizer",
            "",
        ),
        (
            "tables 5.14, 5.27",
            "Adadelta",
            "ratios of input, exchange and optimizer",
            "numbered by their place; the ratios are printed",
        ),
        (
            "table 5.28",
            "regularizer operators at 512",
            "",
            "torch computes the L2 term within other operators, so that there is no equal category",
        ),
    ),
    *_items(
        "pool",
        ("output, one machine", "epochs of a alone", "Epochs: published and here", ""),
        ("output, -energy", "epochs of a and b", "Epochs: published and here", ""),
        (
            "output, -gpus",
            "epochs of d and e",
            "Epochs: published and here",
            "seconds are not legible; the sum is derived",
        ),
        (
            "output, -cpus",
            "epochs of a, b and c",
            "Epochs: published and here",
            "only ms/step are legible",
        ),
        ("output, all", "command only", "", "the study prints no result for all five machines"),
        (
            "figure of memory bandwidth",
            "GB/s of CPUs and GPUs over years",
            "",
            "background, not a result; its values are not legible",
        ),
    ),
)


def items_of(study: str) -> tuple[PublishedItem, ...]:
    return tuple(item for item in ITEMS if item.study == study)
