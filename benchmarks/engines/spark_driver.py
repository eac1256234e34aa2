"""A driver of Spark that runs one application after the other as `spark` (the benchmark) tells it on its input.

A program of its own: its JVM stays warm, so that every application begins alike, with new executors. Each line of the
input is `{"workload", "scale", "settings"}`; for each it prints `{"seconds"}` when the work is done, and ends the
application when it reads another line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

PARTITIONS = 16


def kmeans(session: Any, scale: float) -> None:
    """K-means over cached points: every iteration reads all of them and passes on nothing but sums."""
    from pyspark.ml.clustering import KMeans
    from pyspark.ml.feature import VectorAssembler

    names = [f"x{i}" for i in range(20)]
    columns = ["id", *(f"rand({i}) as {name}" for i, name in enumerate(names))]
    rows = session.range(0, int(60000 * scale), 1, PARTITIONS).selectExpr(*columns)
    points = VectorAssembler(inputCols=names, outputCol="features").transform(rows).select("features").cache()
    KMeans(k=30, maxIter=8, tol=0.0, seed=1, initMode="random").fit(points)


def als(session: Any, scale: float) -> None:
    """Alternating least squares: every half iteration shuffles the factors."""
    from pyspark.ml.recommendation import ALS

    columns = ["cast(rand(1) * 3000 as int) as user", "cast(rand(2) * 1500 as int) as item", "rand(3) as rating"]
    ratings = session.range(0, int(120000 * scale), 1, PARTITIONS).selectExpr(*columns)
    work = ALS(
        userCol="user",
        itemCol="item",
        ratingCol="rating",
        rank=20,
        maxIter=5,
        seed=1,
        numUserBlocks=8,
        numItemBlocks=8,
    )
    work.fit(ratings)


WORKLOADS = {"kmeans": kmeans, "als": als}


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
            WORKLOADS[order["workload"]](session, order["scale"])
            print(json.dumps({"seconds": time.monotonic() - began}), flush=True)
            sys.stdin.readline()
        finally:
            session.stop()
        print(json.dumps({"stopped": True}), flush=True)


if __name__ == "__main__":
    main()
