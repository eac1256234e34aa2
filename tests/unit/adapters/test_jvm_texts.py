"""What JVMs print, as JDK 17 and 25 printed it, and what is read from it; command lines; original values in files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from app_adapters.adapter import Deadline, Promise
from app_adapters.errors import ApplicationError
from app_adapters.jvm.adapter import Facts, JVMAdapter
from app_adapters.jvm.flags import collector, parse_flags, size_mib, with_value
from app_adapters.jvm.heap import Heap, Resident, parse_heap, resident
from app_adapters.jvm.processes import Choice, Finder, Process, jvm_kind, main_classes
from app_adapters.jvm.transports import Transport
from app_adapters.processes.originals import Originals
from app_adapters.processes.process import started

FLAGS = """[Global flags]
    uintx G1PeriodicGCInterval                     = 0                                      {manageable} {default}
    ccstr HeapDumpPath                             =                                        {manageable} {default}
   size_t MaxHeapSize                              = 536870912                                 {product} {command line}
   size_t SoftMaxHeapSize                          := 536870912                              {manageable} {ergonomic}
ccstrlist CompileCommand                           = exclude a b                               {product} {command line}
     bool UseZGC                                   = true                                      {product} {command line}
     bool UseG1GC                                  = false                                     {product} {default}
     bool UsePerfData                              = true                              {pd product}
"""


def test_flags_are_read_with_their_values_and_kinds() -> None:
    flags = parse_flags(FLAGS)
    assert len(flags) == 8
    assert collector(flags) == "ZGC"
    assert size_mib(flags, "MaxHeapSize") == size_mib(flags, "SoftMaxHeapSize") == 512
    assert [name for name, flag in flags.items() if flag.manageable] == [
        "G1PeriodicGCInterval",
        "HeapDumpPath",
        "SoftMaxHeapSize",
    ]
    assert flags["HeapDumpPath"].value == ""
    assert flags["CompileCommand"].value == "exclude a b"
    assert with_value(flags, "MaxHeapSize", "1")["MaxHeapSize"].value == "1"
    with pytest.raises(ApplicationError, match="lists no flags"):
        parse_flags("Unrecognized VM option")


HEAPS = {
    "Shenandoah 17": (
        "Shenandoah Heap\n 512M max, 512M soft max, 161M committed, 67328K used\n 2048 x 256K regions\n"
        "Reserved region:\n - [0x00000000e0000000, 0x0000000100000000) \n\n Metaspace       used 452K\n",
        Heap(161, 65.75, 0xE0000000, 0x100000000),
    ),
    "ZGC 17": (" ZHeap           used 162M, capacity 378M, max capacity 512M\n Metaspace  used 1K\n", Heap(378, 162)),
    "ZGC 25": (
        "ZHeap            used 154M, capacity 378M, max capacity 512M\n Cache           224M (4)\n",
        Heap(378, 154),
    ),
    "G1 17": (
        " garbage-first heap   total 443392K, used 157696K [0x00000000e0000000, 0x0000000100000000)\n"
        "  region size 1024K, 0 young (0K), 0 survivors (0K)\n Metaspace       used 396K, committed 576K\n",
        Heap(433, 154, 0xE0000000, 0x100000000),
    ),
    "G1 25": (
        "garbage-first heap   total reserved 524288K, committed 387072K, used 157696K [0x00000000e0000000, "
        "0x0000000100000000)\n region size 1024K\n",
        Heap(378, 154, 0xE0000000, 0x100000000),
    ),
    "Serial 17": (
        " def new generation   total 116736K, used 0K [0x00000000e0000000, 0x00000000e7e10000, 0x00000000eaaa0000)\n"
        "  eden space 103360K,   0% used [0x00000000e0000000, 0x00000000e0000000, 0x00000000e64f0000)\n"
        " tenured generation   total 258048K, used 154624K [0x00000000eaaa0000, 0x00000000fa6a0000, "
        "0x0000000100000000)\n   the space 258048K,  59% used [0x00000000eaaa0000, 0x00000000f415d138)\n",
        Heap(366, 151, 0xE0000000, 0x100000000),
    ),
    "Serial 25": (
        "DefNew     total 116736K, used 0K [0x00000000e0000000, 0x00000000e7e10000, 0x00000000eaaa0000)\n"
        " eden space 103360K,   0% used [0x00000000e0000000, 0x00000000e0000000, 0x00000000e64f0000)\n"
        "Tenured    total 258048K, used 154624K [0x00000000eaaa0000, 0x00000000fa6a0000, 0x0000000100000000)\n",
        Heap(366, 151, 0xE0000000, 0x100000000),
    ),
}


@pytest.mark.parametrize("name", HEAPS)
def test_the_heap_of_each_collector_is_read(name: str) -> None:
    text, heap = HEAPS[name]
    assert parse_heap(text) == heap


def test_a_heap_in_other_words_is_an_error() -> None:
    with pytest.raises(ApplicationError, match="not known here"):
        parse_heap("Epsilon Heap\nAllocation space:\n")


SMAPS = """e0000000-e8000000 rw-p 00000000 00:00 0
Rss:              131072 kB
Pss:              131072 kB
Pss_Dirty:        131072 kB
VmFlags: rd wr
7f0000000000-7f0000100000 r-xp 00000000 08:01 77 /usr/lib/libjvm.so
Pss:                2048 kB
40000000000-40010000000 rw-s 00000000 00:01 5 /memfd:java_heap (deleted)
Pss:                4096 kB
"""


def test_what_is_resident_is_parted_into_heap_and_rest() -> None:
    lines = SMAPS.splitlines(keepends=True)
    found = resident(lines, Heap(1, 1, 0xE0000000, 0x100000000))
    assert (found.all_mib, found.heap_mib, found.other_mib) == (134, 128, 6)
    assert resident(lines, Heap(1, 1)).heap_mib == 4


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("java -Xmx1g -cp a:b org.example.Server --port 1", ["org.example.Server", "Server"]),
        ("java -ea --class-path lib -Dx=y Server", ["Server", "Server"]),
        ("java -jar /srv/app.jar Server", ["/srv/app.jar", "app.jar"]),
        ("java -p mods -m shop/org.example.Shop", ["org.example.Shop", "Shop"]),
        ("java --module=shop/org.example.Shop", ["org.example.Shop", "Shop"]),
        ("java @options Main", ["Main", "Main"]),
        ("java -version", []),
        ("", []),
    ],
)
def test_the_main_class_of_a_command_line(line: str, names: list[str]) -> None:
    assert main_classes(line.split()) == names


def make_process(procfs: Path, pid: int, maps: str, command: str = "java Main", start: int = 5) -> None:
    home = procfs / str(pid)
    home.mkdir(exist_ok=True)
    (home / "maps").write_text(maps)
    (home / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
    (home / "stat").write_text(f"{pid} (java) S " + " ".join(["1"] * 18) + f" {start} 0\n")


def test_openj9_is_told_and_not_touched(tmp_path: Path) -> None:
    make_process(tmp_path, 10, "1-2 r-xp 0 0 0 /jdk/lib/j9vm/libjvm.so\n1-2 r-xp 0 0 0 /jdk/lib/libj9vm29.so\n")
    assert jvm_kind(10, str(tmp_path)) == "OpenJ9"
    with pytest.raises(ApplicationError, match="OpenJ9 JVM: untested"):
        Finder(Choice(main_class="Main"), str(tmp_path)).find()


def test_a_pid_that_is_used_again_is_looked_up_anew(tmp_path: Path) -> None:
    maps = "1-2 r-xp 0 0 0 /jdk/lib/server/libjvm.so\n"
    make_process(tmp_path, 10, maps)
    make_process(tmp_path, 11, "1-2 r-xp 0 0 0 /bin/sh\n", "sh -c java Main")
    finder = Finder(Choice(match="java Main"), str(tmp_path))
    assert finder.find().start == 5
    make_process(tmp_path, 10, maps, start=6)
    assert finder.find().start == 6
    make_process(tmp_path, 12, maps)
    assert finder.find().pid == 10  # it still runs: another one like it is none of ours
    make_process(tmp_path, 10, "", "sleep")
    (tmp_path / "10" / "stat").unlink()
    assert finder.find().pid == 12


@pytest.mark.parametrize("text", ["", "x", "-1", "0", str(2**40)])
def test_a_pid_file_without_a_pid_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "pid").write_text(text)
    with pytest.raises(ApplicationError, match="does not hold a pid"):
        Finder(Choice(pid_file=str(tmp_path / "pid"))).find()


def test_original_values_are_kept_once_and_those_of_dead_jvms_go(tmp_path: Path) -> None:
    originals = Originals(str(tmp_path / "state"))
    pid, start = os.getpid(), started(os.getpid())
    assert start is not None
    assert originals.load(pid, start) == {}
    originals.remember(2**22 + 1, 1, {"a": "0"})
    assert originals.remember(pid, start, {"a": "1"}) == {"a": "1"}
    assert originals.remember(pid, start, {"a": "2", "b": "3"}) == {"a": "1", "b": "3"}
    assert [path.name for path in (tmp_path / "state").iterdir()] == [f"{pid}-{start}.json"]
    assert Originals(str(tmp_path / "state")).load(pid, start) == {"a": "1", "b": "3"}
    originals.forget(pid, start)
    originals.forget(pid, start)
    assert originals.load(pid, start) == {}


def test_a_state_that_cannot_be_kept_or_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ApplicationError, match="cannot be"):
        Originals(str(tmp_path / "file")).remember(1, 1, {"a": "1"})
    (tmp_path / "1-1.json").write_text('{"a": 1}')
    with pytest.raises(ApplicationError, match="does not hold settings"):
        Originals(str(tmp_path)).load(1, 1)


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only file system says so before it looks for the name."""

    def unlink(path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "unlink", unlink)


def test_where_nothing_is_kept_a_read_only_file_system_is_no_obstacle(tmp_path: Path, read_only: None) -> None:
    Originals(str(tmp_path)).replace(1, 1, "ending", "")
    (tmp_path / "1-1.json").write_text('{"ending": "7"}')
    with pytest.raises(ApplicationError, match="cannot be removed: Read-only file system"):
        Originals(str(tmp_path)).replace(1, 1, "ending", "")


def test_a_jvm_whose_flags_are_back_is_reinflated_though_their_file_cannot_be_removed(
    tmp_path: Path, read_only: None
) -> None:
    class Takes(Transport):
        def command(self, pid: int, text: str, limit_s: float) -> str:
            raise AssertionError(text)

        def set_flag(self, pid: int, name: str, value: str, limit_s: float) -> None:
            self.flag = name, value

    class Read(JVMAdapter):
        def _read(self, limit_s: float, collected: bool = False) -> Facts:
            flags = with_value(parse_flags(FLAGS), "SoftMaxHeapSize", str(2**28))
            return Facts(Process(1, 1), flags, Heap(161, 65), Resident(300, 161), None, 0.0)

    (tmp_path / "1-1.json").write_text(f'{{"SoftMaxHeapSize": "{2**29}"}}')
    transport = Takes()
    promise = Read(Finder(Choice(pid=1)), transport, Originals(str(tmp_path))).reinflate(
        {"memory_mib": 2048.0}, Deadline(60)
    )
    assert isinstance(promise, Promise)
    release = promise.work()
    assert release.complete
    assert transport.flag == ("SoftMaxHeapSize", str(2**29))
    assert "cannot be removed: Read-only file system" in release.reason
