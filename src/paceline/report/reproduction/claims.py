"""Claims of the published studies, judged by their printed numbers, and where ours are shown."""

from dataclasses import dataclass

from paceline.report.tables import Column, ReportTable, make_table

YES, PARTLY, NO = "yes", "in part", "no"


@dataclass(frozen=True)
class Claim:
    """A claim of a study; standard errors are those of a test accuracy on 10,000 images."""

    study: str
    text: str
    is_carried: str
    by: str
    """The printed numbers that carry or contradict it."""
    ours: str
    """Column or table with our measurement."""


def _claims(study: str, *rows: tuple[str, str, str, str]) -> tuple[Claim, ...]:
    return tuple(Claim(study, *row) for row in rows)


CLAIMS = (
    *_claims(
        "switch",
        (
            "all-reduce is most accurate",
            PARTLY,
            "ResNet 92.71 against 90.81 (5 standard errors), DenseNet 94.51 against 93.99 (1.6)",
            "validation accuracy",
        ),
        ("ps is fastest", YES, "13.5% and 21.8% less time, one run each", "over all-reduce"),
        (
            "the switch at 50% is the best compromise",
            PARTLY,
            "9.0% and 12.6% less time, accuracy within one standard error; 75% is below 50% on "
            "ResNet",
            "validation accuracy, over all-reduce",
        ),
        (
            "time grows with the share of all-reduce",
            YES,
            "a straight line is off by at most 2.5%",
            "straight line",
        ),
        (
            "switching generalizes better",
            NO,
            "validation losses cannot be compared: probably one includes the L2 term",
            "validation loss, without the L2 term",
        ),
    ),
    *_claims(
        "ps-allreduce",
        (
            "equal accuracy on MNIST at 128, all-reduce 17% faster",
            YES,
            "0.9804 both; 144.7 against 173.9 s, with nine workers against six",
            "test accuracy and seconds",
        ),
        (
            "ps is better and faster on Fashion-MNIST",
            PARTLY,
            "accuracy differs by 2.9 and 3.3 points; the seconds are not plausible, as KMNIST with "
            "the same network took 56% and 37% of them",
            "test accuracy and seconds",
        ),
        (
            "ps is better on KMNIST",
            PARTLY,
            "1.5 standard errors at 128, 6.7 at 256",
            "test accuracy",
        ),
        (
            "the larger batch is better and faster",
            PARTLY,
            "less time in all; of six differences in accuracy only those of KMNIST exceed 2 "
            "standard errors",
            "seconds by batch",
        ),
        (
            "batch 128 uses more of every resource",
            NO,
            "CPU on KMNIST with all-reduce is 12.0 at 256 against 10.2",
            "CPU, memory and network",
        ),
        (
            "larger shards explain the accuracy of ps",
            NO,
            "every sample is seen once per epoch; updates differ instead (derived)",
            "updates; matrix study-shards",
        ),
    ),
    *_claims(
        "spark-tensorflow",
        (
            "TensorFlow prepares batches up to 164 times faster",
            YES,
            "0.003 against 0.460 s, of an epoch of about 33 s (derived)",
            "ratios, and its share of training",
        ),
        (
            "Horovod exchanges gradients up to 23 times faster",
            PARTLY,
            "only after the correction; at most 10 times on CIFAR-10",
            "here: exchange, on Spark / plain",
        ),
        (
            "Spark reads faster in both experiments",
            NO,
            "466 against 291 s on MNIST",
            "read, here",
        ),
        (
            "Spark speeds up Square and Sum",
            NO,
            "these operators run inside TensorFlow in both systems",
            "seconds of self time by category",
        ),
        ("CPU rises with the batch", YES, "read off plots", "memory and CPU"),
    ),
    *_claims(
        "pool",
        ("GPUs are fastest", YES, "11 against 33 and 52 s, one run each", "seconds"),
        ("the efficient machines are slowest", YES, "52 s", "seconds"),
        ("one machine suffices for a small model", YES, "50 s, and the best accuracy", "seconds"),
        (
            "the GPU machines learn better",
            NO,
            "as many updates as the efficient ones: 1,407 (derived)",
            "updates",
        ),
    ),
)


def make_claim_table(study: str) -> ReportTable:
    records = [
        {
            Column("claim"): claim.text,
            Column("carried by its numbers"): claim.is_carried,
            Column("printed"): claim.by,
            Column("here"): claim.ours,
        }
        for claim in CLAIMS
        if claim.study == study
    ]
    note = "A repetition with one seed, or at small scale, does not decide any of them."
    return make_table("published-claims", "Published claims", records, note)
