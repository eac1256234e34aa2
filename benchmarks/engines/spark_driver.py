"""A driver of Spark that runs one application after the other as `spark` (the benchmark) tells it on its input.

A program of its own: its JVM stays warm, so that every application begins alike, with new executors. Each line of the
input is `{"workload", "rows", "rounds", "settings"}`; for each it prints `{"seconds"}` when the work is done, and ends
the application when it reads another line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

PARTITIONS = 16
#: One a slot: each step of the training waits for all.
SHARDS = 8
INPUTS, HIDDEN = 100, 100
BATCH = 0.5


def kmeans(session: Any, rows: int, rounds: int) -> None:
    """K-means over cached points: every iteration reads all of them and passes on nothing but sums."""
    from pyspark.ml.clustering import KMeans
    from pyspark.ml.feature import VectorAssembler

    names = [f"x{i}" for i in range(20)]
    columns = ["id", *(f"rand({i}) as {name}" for i, name in enumerate(names))]
    found = session.range(0, rows, 1, PARTITIONS).selectExpr(*columns)
    points = VectorAssembler(inputCols=names, outputCol="features").transform(found).select("features").cache()
    KMeans(k=100, maxIter=rounds, tol=0.0, seed=1, initMode="random").fit(points)


def als(session: Any, rows: int, rounds: int) -> None:
    """Alternating least squares: every half iteration shuffles the factors."""
    from pyspark.ml.recommendation import ALS

    columns = ["cast(rand(1) * 3000 as int) as user", "cast(rand(2) * 1500 as int) as item", "rand(3) as rating"]
    ratings = session.range(0, rows, 1, PARTITIONS).selectExpr(*columns)
    work = ALS(userCol="user", itemCol="item", ratingCol="rating", rank=60, maxIter=rounds, seed=1)
    work.setNumBlocks(PARTITIONS).fit(ratings)


def sgd(session: Any, rows: int, rounds: int) -> None:
    """Synchronous training of a network with one hidden layer: in each step all shards give a gradient of a batch."""
    import numpy

    def shard(number: int) -> tuple[Any, Any]:
        random = numpy.random.default_rng(number)
        points = random.normal(size=(rows // SHARDS, INPUTS)).astype("float32")
        return points, numpy.sin(points.sum(axis=1, keepdims=True))

    def gradients(sums: Any, data: tuple[Any, Any]) -> Any:
        step, (first, second) = shared.value
        picked = numpy.random.default_rng(step).random(len(data[0])) < BATCH
        points, wanted = data[0][picked], data[1][picked]
        hidden = numpy.tanh(points @ first)
        error = (hidden @ second - wanted) / len(points)
        found = points.T @ ((error @ second.T) * (1 - hidden**2)), hidden.T @ error
        return found if sums is None else tuple(map(numpy.add, sums, found))

    def both(one: Any, other: Any) -> Any:
        return other if one is None else one if other is None else tuple(map(numpy.add, one, other))

    context = session.sparkContext
    data = context.parallelize(range(SHARDS), SHARDS).map(shard).cache()
    random = numpy.random.default_rng(0)
    weights = tuple(random.normal(size=size).astype("float32") / 10 for size in ((INPUTS, HIDDEN), (HIDDEN, 1)))
    for number in range(rounds):
        shared = context.broadcast((number, weights))
        slopes = data.treeAggregate(None, gradients, both)
        weights = tuple(weight - 0.1 * slope / SHARDS for weight, slope in zip(weights, slopes, strict=True))
        shared.destroy()


WORKLOADS = {"kmeans": kmeans, "als": als, "sgd": sgd}


def main() -> None:
    """Serve until the input ends."""
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        conf = SparkConf().setAll(order["settings"].items()).setAppName(order["workload"])
        session = SparkSession.builder.config(conf=conf).getOrCreate()
        try:
            session.range(1).count()  # waits for all executors
            began = time.monotonic()
            WORKLOADS[order["workload"]](session, order["rows"], order["rounds"])
            print(json.dumps({"seconds": time.monotonic() - began}), flush=True)
            sys.stdin.readline()
        finally:
            session.stop()
        print(json.dumps({"stopped": True}), flush=True)


if __name__ == "__main__":
    main()
