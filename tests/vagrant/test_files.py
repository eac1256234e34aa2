"""The Vagrantfiles, and what `vagrant/ebbtide.rb` puts into the domain of a VM. No machine is started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hostagent.mechanisms.fixes import CHANNEL
from tests import libvirt_driver

ROOT = Path(__file__).parents[2]
#: A domain as vagrant-libvirt defines it.
DOMAIN = """<domain type='test'>
  <name>web</name>
  <memory unit='KiB'>2097152</memory>
  <currentMemory unit='KiB'>2097152</currentMemory>
  <vcpu placement='static'>2</vcpu>
  <os><type arch='i686'>hvm</type></os>
  <devices>
    <channel type='unix'>
      <target type='virtio' name='org.qemu.guest_agent.0'/>
    </channel>
  </devices>
</domain>
"""
#: In the place of Vagrant's own.
VAGRANT = """
module Vagrant
  def self.plugin(_)
    Class.new do
      def self.name(*); end
      def self.action_hook(*); end
    end
  end
end
"""
SCRIPT = (
    VAGRANT
    + """
require ARGV[0]
document = REXML::Document.new($stdin.read)
$stderr.print Ebbtide.equip(document.root, headroom_mib: ARGV[1].to_i, headroom_cpus: ARGV[2].to_i)
print document
"""
)
#: Reads a Vagrantfile, and runs what follows the start of its first host, which has not joined. Prints what runs on the
#: manager, and on the host.
JOINS = (
    VAGRANT
    + """
def Vagrant.configure(_) = yield(Recorder.new)
class Recorder < BasicObject
  def method_missing(name, *words, **options, &block)
    # The last one; one before it begins every start.
    $joins = block if name == :ruby
    block&.call(self) unless name == :ruby || words == ["manager"]
    self
  end
end
Machine = Struct.new(:name) do
  def communicate = self
  def ui = self
  def test(*, **) = false
  def detail(*) = nil
  def sudo(command)
    puts "#{name}: #{command}"
    yield :stdout, "the line\\n"
  end
end
ENV["EBB_VAGRANT_HOSTS"] = "1"
load ARGV[0]
env = Object.new
def env.machine(name, _) = Machine.new(name)
$joins.call(env, Machine.new(:"host-1"))
"""
)


def validate(folder: Path, home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": os.environ["PATH"], "HOME": str(home), "VAGRANT_HOME": str(home / "vagrant"), "LC_ALL": "C.UTF-8"}
    return subprocess.run(["vagrant", "validate"], cwd=folder, env={**given, **environ}, capture_output=True, text=True)


def equipped(xml: str, headroom_mib: int = 0, headroom_cpus: int = 0) -> tuple[str, bool]:
    command = ["ruby", "-e", SCRIPT, str(ROOT / "vagrant/ebbtide.rb"), str(headroom_mib), str(headroom_cpus)]
    done = subprocess.run(command, input=xml, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr == "true"


def taken(xml: str) -> ElementTree.Element:
    """What libvirt makes of a definition."""
    connection = libvirt_driver.opened()
    try:
        domain = connection.defineXML(xml)
        try:
            return ElementTree.fromstring(domain.XMLDesc())
        finally:
            # Every connection of this process to the default test driver sees the same domains.
            domain.undefine()
    finally:
        connection.close()


def text(domain: ElementTree.Element, path: str) -> str:
    found = domain.findtext(path)
    assert found is not None, ElementTree.tostring(domain, "unicode")
    return found


@pytest.mark.parametrize(
    ("folder", "environ"), [("vagrant", {}), ("vagrant", {"EBB_VAGRANT_HOSTS": "3"}), ("vagrant/existing-lab", {})]
)
def test_vagrant_takes_the_file(folder: str, environ: Mapping[str, str], tmp_path: Path) -> None:
    done = validate(ROOT / folder, tmp_path, **environ)
    assert (done.returncode, done.stdout) == (0, "Vagrantfile validated successfully.\n"), done.stderr


def test_a_setting_that_cannot_be_is_refused(tmp_path: Path) -> None:
    done = validate(ROOT / "vagrant", tmp_path, EBB_VAGRANT_HOSTS="many")
    assert done.returncode != 0
    assert 'invalid value for Integer(): "many"' in done.stderr


def test_a_host_that_was_made_anew_joins_since_it_is_invited_by_its_name() -> None:
    ruby = ["ruby", "-e", JOINS, str(ROOT / "vagrant/Vagrantfile")]
    done = subprocess.run(ruby, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "manager: ebb host invite host-1\nhost-1: the line\n"), done.stderr


def test_a_vm_of_a_lab_gets_the_channel_and_half_of_its_memory_as_a_device() -> None:
    xml, changed = equipped(DOMAIN)
    domain = taken(xml)
    assert changed
    assert [found.get("name") for found in domain.findall("devices/channel/target")] == [
        "org.qemu.guest_agent.0",
        CHANNEL,
    ]
    assert [text(domain, path) for path in ("maxMemory", "memory", "vcpu")] == ["2097152", "2097152", "2"]
    cell = domain.find("cpu/numa/cell")
    assert cell is not None
    assert (cell.get("cpus"), cell.get("memory")) == ("0-1", "1048576")
    target = "devices/memory[@model='virtio-mem']/target/"
    assert [text(domain, target + name) for name in ("size", "block", "requested")] == ["1048576", "2048", "1048576"]


def test_a_host_gets_room_to_grow_and_begins_with_what_it_had() -> None:
    domain = taken(equipped(DOMAIN, headroom_mib=4096, headroom_cpus=2)[0])
    assert text(domain, "maxMemory") == str(6 * 2**20)
    cell, vcpu = domain.find("cpu/numa/cell"), domain.find("vcpu")
    assert cell is not None
    assert vcpu is not None
    assert (cell.get("cpus"), cell.get("memory")) == ("0-3", str(2 * 2**20))
    assert (vcpu.get("current"), vcpu.text) == ("2", "4")
    target = "devices/memory[@model='virtio-mem']/target/"
    assert [text(domain, target + name) for name in ("size", "requested")] == [str(4 * 2**20), "0"]
    pluggable = [found.get("hotpluggable") for found in domain.findall("vcpus/vcpu")]
    assert pluggable == ["no", "yes", "yes", "yes"]


@pytest.mark.parametrize("headroom", [(0, 0), (4096, 2)])
def test_what_is_there_stays(headroom: tuple[int, int]) -> None:
    once, _ = equipped(DOMAIN, *headroom)
    assert equipped(once, *headroom) == (once, False)


def test_numa_nodes_of_somebody_s_are_left_alone() -> None:
    nodes = "<cpu><numa><cell id='0' cpus='0-1' memory='2097152'/></numa></cpu><devices>"
    xml, _ = equipped(DOMAIN.replace("<devices>", nodes))
    assert "virtio-mem" not in xml
    assert CHANNEL in xml
