"""A few good lines of every format, made up in its form, and what writes them to a file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

SWF: Final = b"""; Version: 2.2
; MaxProcs: 240
;
    1        0 308434  31405   30  31405    -1   30  37980    -1  1   1   1  -1 -1  1 -1 -1
    2        8 308426  31039   -1  31039  1024   16     -1    -1  1   2   1  -1 -1  1 -1 -1
    3       12     -1     -1   30     -1    -1   30  37980    -1  0   1   1  -1 -1  1 -1 -1
    4   179350  99808 143967    2 142977    -1    2 144000  2048  1   3   1  -1 -1  1 -1 -1
"""

VMTABLE: Final = b"""vm+A/1=,sub1,dep1,0,2591700,99.36,3.42,10.19,Delay-insensitive,1,1.75
vm+A/2=,sub1,dep1,0,1539300,100,6.18,33.6,Interactive,1,0.75
vm+A/3=,sub2,dep2,2188800,2195100,17.7,2.5,17.7,Unknown,>24,>64
vm+A/4=,sub3,dep3,300,1200,100,100.0000001,100,Interactive,8,14
"""

GOOGLE_2011: Final = b"""0,2,3418309,0,4155527081,0,70s3v5qRyCO,3,9,0.125,0.07446,0.000424,0
0,2,3418309,0,4155527081,1,70s3v5qRyCO,3,9,0.125,0.07446,0.000424,0
600000000,,3418314,1,,0,user,0,0,0.0625,0.05,0.0001,0
610000000,,3418314,1,329150663,1,user,0,0,0.0625,0.05,0.0001,0
700000000,,3418314,1,329150663,4,user,0,0,0.0625,0.05,0.0001,0
720000000,,3418315,0,,0,user,0,2,0.25,0.1,0.0001,1
725000000,,3418315,0,1,1,user,0,2,0.25,0.1,0.0001,1
730000000,,3418315,0,1,2,user,0,2,0.25,0.1,0.0001,1
731000000,,3418315,0,,0,user,0,2,0.25,0.1,0.0001,1
740000000,,3418315,0,1,1,user,0,2,0.25,0.1,0.0001,1
790000000,,3418315,0,1,4,user,0,2,0.25,0.1,0.0001,1
9223372036854775807,,3418309,0,4155527081,4,70s3v5qRyCO,3,9,0.125,0.07446,0.000424,0
"""

_INSTANCES: Final = (
    {"time": "600000000", "type": "0", "collection_id": "9", "instance_index": "3", "priority": "200"},
    {"time": "601000000", "type": "SCHEDULE", "collection_id": "9", "instance_index": 3, "priority": 200},
    {"time": "602000000", "type": 3, "collection_id": "7", "instance_index": "0", "collection_type": "1"},
    {"time": "661000000", "type": "6", "collection_id": "9", "instance_index": "3", "priority": "200"},
)


def _lines(documents: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(document).encode() + b"\n" for document in documents)


GOOGLE_2019: Final = _lines(
    [dict(event, resource_request={"cpus": 0.25, "memory": 0.125}, constraint=[]) for event in _INSTANCES]
)
GOOGLE_2019_MACHINES: Final = _lines(
    [
        {"time": "0", "machine_id": "5", "type": "1", "capacity": {"cpus": 0.5, "memory": 0.25}},
        {"time": "660000000", "machine_id": "5", "type": "REMOVE"},
        {"time": "700000000", "machine_id": "5", "type": "ADD", "capacity": {"cpus": 1.0, "memory": 0.25}},
    ]
)

TEXTS: Final[dict[str, bytes]] = {
    "vms": b"id,group,arrives_s,departs_s,cpu_cores,memory_mib,priority,utilisation\n"
    b"a,,0,10.5,2,1024,low,0.25\nb,t,3,,0.5,,unknown,\nc,t,3,3,4,2048,high,1\n",
    "jobs": b"id,group,submit_s,runtime_s,cpu_cores,memory_mib,priority,requested_s,task_runtime_s\n"
    b"a,,0,10,2,,low,,5;15\nb,g,1.5,3,1,64,high,60,3\n",
    "capacity": b"machine,at_s,cpu_cores,memory_mib\nm0,0,24,1024\nm1,0,24,\nm0,3600,0,0\n",
    "series": b"at_s,value\n0,1.5\n300,-2\n600,1e-3\n",
    "azure-derived": b"arrival_s,batch,cores,mem_gb,dur_lo_s,dur_hi_s,censored,dur_s\n"
    b"300,0,8,14.0,300,300,0,300\n300,1,1,0.75,259500,345600,1,302550\n600,0,2,3.5,900,900,0,900\n",
    "gaia": b"arrival_time,length,cpus\n0.0,0.75,4\n0.5,19.083333333333332,4\n2.0,6.0,1\n",
    "alibaba-openb-pods": b"name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,"
    b"deletion_time,scheduled_time\n"
    b"p0,12000,16384,1,1000,,LS,Running,0,12902960,0\np1,6000,12288,1,460,,BE,Failed,427061,427062,\n"
    b"p2,500,0,0,0,V100M16|V100M32,Burstable,Pending,50,60,\n",
    "alibaba-openb-nodes": b"sn,cpu_milli,memory_mib,gpu,model\nn0,32000,262144,0,\nn1,96000,786432,8,V100M32\n",
    "alibaba-dlrm": b"instance_sn,role,app_name,cpu_request,cpu_limit,gpu_request,memory_request,creation_time,"
    b"scheduled_time,deletion_time\n"
    b"i0,HN,app_0,12,12,1,120.0,,,\ni1,CN,app_1,64,64,0,320.0,1435629.0,1435629.0,1435760.0\n",
    "google-2019-tasks-csv": b"time,type,collection_id,instance_index,priority,collection_type,resource_request.cpus,"
    b"resource_request.memory\n600000000,0,9,3,100,0,0.25,0.5\n601000000,3,9,3,100,0,0.25,0.5\n"
    b"661000000,6,9,3,100,0,0.25,0.5\n",
    "carbon-intensity": "Datetime (UTC),Country,Zone id,Carbon intensity gCO₂eq/kWh (direct),"
    "Carbon intensity gCO₂eq/kWh (Life cycle)\n"
    "2021-01-01 00:00:00,USA,US-X,235.72,314.54\n2021-01-01 01:00:00,USA,US-X,,300\n"
    "2021-01-01 02:00:00,USA,US-X,249.08,329.55\n".encode(),
    "generation": b",Biomass,Solar,Wind Offshore,Wind Onshore,FR\n"
    b"2019-12-20 00:00:00,2824.0,0.0,5413.0,5754.0,1623.0\n2019-12-20 00:30:00,2916.0,0.0,4911.0,5679.0,1623.0\n",
    "spot-availability": json.dumps({"metadata": {"gap_seconds": 300}, "data": [0, 3, 3, 16, 0]}).encode(),
    "google-2019-tasks": GOOGLE_2019,
    "google-2019-machines": GOOGLE_2019_MACHINES,
    "swf": SWF,
    "borg-window": b"256988 642900 21000 8 release\n404670 531300 600 2 running\n217315 965100 11700 2 release\n",
    "spot-nodes": b"480000,add,node1\n540000,add,node2\n600000,remove,node1\n",
    "spot-polls": b"2021-12-10, 13:07:45, 80\n2021-12-10, 13:09:45, 78\n2021-12-10, 13:08:45, 70\n",
    "azure-vmtable": VMTABLE,
    "google-2011-tasks": GOOGLE_2011,
    "google-2011-machines": b"0,5,0,HofLGzk1Or,0.5,0.2493\n0,6,0,HofLGzk1Or,0.5,0.2493\n"
    b"834349000000,5,1,HofLGzk1Or,,\n840000000000,5,0,HofLGzk1Or,0.5,0.2493\n",
    "alibaba-batch-tasks": b"M1,1,j_1,1,Terminated,419367,419378,100.00,0.20\n"
    b"R2_1,3,j_1,1,Terminated,419400,419410,50.00,0.20\nM1,1,j_2,7,Failed,87076,0,100.00,0.20\n"
    b"M1,1,j_3,7,Running,87076,,,\n",
    "alibaba-machines": b"m_1932,0,1036,5,96,100,USING\nm_2,0,1,d,64,50,USING\n",
    "alibaba-sample-tasks": b"0,j_1446403,R23_22,268,50.0,0.3,9\n5,j_1446403,M1,0,50.0,0.3,9\n"
    b"7,j_7,M1,10,100.0,0.3,1\n",
    "hawk-tr": b"7.5 2 10.0 8.0 12.0\n9 1 3.5 3.5 \n10 3 2  1 2 3\n",
}


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


PARQUETS: Final[dict[str, bytes]] = {
    "vms-parquet": _parquet(
        pa.table({"id": ["a", "b"], "arrives_s": [0.0, 2.0], "departs_s": [1.0, None], "cpu_cores": [1.0, 2.0]})
    ),
    "jobs-parquet": _parquet(
        pa.table(
            {
                "id": ["a", "b"],
                "submit_s": [0.0, 2.0],
                "runtime_s": [1.0, 4.0],
                "cpu_cores": [1.0, 2.0],
                "priority": ["low", "high"],
                "task_runtime_s": pa.array([[1.0], [3.0, 5.0]], pa.list_(pa.float64())),
            }
        )
    ),
    "capacity-parquet": _parquet(pa.table({"machine": ["m", "n"], "at_s": [0.0, 5.0], "cpu_cores": [8.0, 0.0]})),
    "series-parquet": _parquet(pa.table({"at_s": [0, 5, 9], "value": [1.0, 0.0, -3.5]})),
    "opendc-tasks": _parquet(
        pa.table(
            {
                "id": pa.array([7, 8, 9], pa.int32()),
                "submission_time": [1664575200000, 1664575201500, 1664575201000],
                "duration": [1194000, 0, 500],
                "cpu_count": pa.array([16, 16, 1], pa.int32()),
                "mem_capacity": [100000, 100000, 0],
            }
        )
    ),
}

ALL: Final = TEXTS | PARQUETS


def put(directory: Path, data: bytes, name: str = "trace") -> Path:
    """A file with this content."""
    path = directory / name
    path.write_bytes(data)
    return path
