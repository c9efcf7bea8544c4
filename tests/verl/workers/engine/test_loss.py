from __future__ import annotations

import torch

from verl.workers.engine.loss import Metric, MetricKind, combine_metrics


def test_sums_add_means_weigh_maxima_compete() -> None:
    first = {
        "loss": Metric(MetricKind.SUM, torch.tensor(1.5)),
        "share": Metric(MetricKind.MEAN, 0.5, weight=3),
        "top": Metric(MetricKind.MAX, -2.0),
    }
    second = {
        "loss": Metric(MetricKind.SUM, 0.25),
        "share": Metric(MetricKind.MEAN, 0.1, weight=1),
        "top": Metric(MetricKind.MAX, -1.0),
    }
    combined = combine_metrics([first, second])
    assert combined == {"loss": 1.75, "share": 0.4, "top": -1.0}
    assert all(type(value) is float for value in combined.values())


def test_a_rank_without_rows_has_no_say() -> None:
    assert combine_metrics([{}, {"share": Metric(MetricKind.MEAN, 0.25, weight=8)}, {}]) == {"share": 0.25}
    assert combine_metrics([]) == {}
