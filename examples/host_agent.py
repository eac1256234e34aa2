"""A host agent of one's own, without Ebbtide's code: docs/reference/agent-contract.md with nothing behind it.

Its VMs are rows in memory, so every command ends at once; put your hypervisor where ``resize`` sets ``current``, and a
journal where ``self.done`` is filled. Try it: EBB_TOKEN=... python3 host_agent.py host-x 7101, then ebb conformance.
With EBB_MANAGER and EBB_REPORT_TOKEN it reports.
"""

import json
import os
import sys
import threading
import time
import urllib.request
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

PARTS = ("cpu_cores", "memory_mib", "disk_mib_s", "network_mib_s")
FLOOR = {"cpu_cores": 0.1, "memory_mib": 192.0, "disk_mib_s": 1.0, "network_mib_s": 1.0}
OVERHEAD_MIB = 64.0
LARGEST = 1e9


class Refused(Exception):
    def __init__(self, status, detail, field=None):
        errors = [{"field": field, "code": "invalid", "detail": detail}] if field else []
        self.status = status
        self.body = {"type": "about:blank", "title": "Refused", "status": status, "detail": detail, "field": field}
        self.body |= {"code": {404: "not-found", 401: "unauthenticated", 409: "conflict"}.get(status, "invalid")}
        self.body |= {"errors": errors}


def vector(found, field, default=0.0):
    for part, value in found.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if part not in PARTS or not is_number or not 0 <= value <= LARGEST:  # NaN is neither
            raise Refused(400, f"{field}.{part} must be a number from 0 to {LARGEST:g}", f"{field}.{part}")
    return {part: float(found.get(part, default)) for part in PARTS}


class Host:
    def __init__(self, name, url, capacity):
        self.name, self.url, self.capacity = name, url, vector(capacity, "capacity")
        self.vms, self.done = {}, {}  # both belong on disk
        self.incarnation, self.sequence, self.epoch, self.order = uuid.uuid4().hex, 0, 0, 0
        self.lock = threading.RLock()

    def free(self):
        """Capacity less what VMs are charged; a real host takes the least of this and what its kernel has available."""
        left = dict(self.capacity)
        for vm in self.vms.values():
            for part in PARTS:
                left[part] -= vm["current"][part]
            left["memory_mib"] -= 0 if vm["state"] == "stopped" else OVERHEAD_MIB
        return {part: max(value, 0.0) for part, value in left.items()}

    def report(self):
        rows = [vm for vm in self.vms.values() if vm["state"] == "running" and vm["priority"] != "fixed"]
        deflatable = {part: sum(vm["current"][part] - vm["minimum"][part] for vm in rows) for part in PARTS}
        told = {"id": self.name, "url": self.url, "incarnation": self.incarnation, "sequence": self.sequence}
        told |= {"capacity": self.capacity, "free": self.free(), "deflatable": deflatable}
        return told | {"vm_overhead_mib": OVERHEAD_MIB, "accelerator": "none", "vms": list(self.vms.values())}

    def command(self, kind, body, run):
        """Fence, answer repetitions, carry out."""
        epoch, order, request_id = int(body.pop("epoch", 0)), int(body.pop("order", 0)), body.get("request_id")
        if not request_id:
            raise Refused(400, "request_id is required", "request_id")
        if epoch < self.epoch:
            raise Refused(409, f"epoch {epoch} is over: the manager with epoch {self.epoch} leads", "epoch")
        if epoch == self.epoch and order and order <= self.order and request_id not in self.done:
            raise Refused(409, f"order {order} is late: {self.order} came before", "order")
        self.order = max(self.order, order) if epoch == self.epoch else order
        self.epoch = epoch
        if request_id in self.done:
            if self.done[request_id][:2] != (kind, body):
                raise Refused(409, f"request_id {request_id} was used for another request", "request_id")
            return self.done[request_id][2]
        operation = {"request_id": request_id, "kind": kind, "host": self.name, "started_at": time.time()}
        operation |= {"state": "done", "sentence": f"{kind} was done"} | run(body)
        self.done[request_id] = (kind, body, operation)
        self.sequence += 1
        return operation

    def vm(self, name):
        if name not in self.vms:
            raise Refused(404, f"there is no VM {name}", "name")
        return self.vms[name]

    def resize(self, sizes):
        """Bring VMs to sizes; what really happened is what counts (here: all of it)."""
        outcomes, none = [], dict.fromkeys(PARTS, 0.0)
        for name, size in sizes.items():
            vm = self.vm(name)
            before, vm["current"] = vm["current"], size
            row = {"name": name, "generation": vm["generation"], "before": before, "after": size, "target": size}
            outcomes.append(row | {"shortfall": none, "ledger": [], "seconds": 0.0, "sentence": "resized"})
        return {"vms": outcomes}

    def require_room(self, name, size, field):
        charge = {**size, "memory_mib": size["memory_mib"] + OVERHEAD_MIB}
        if any(charge[part] > self.free()[part] + 1e-6 for part in ("cpu_cores", "memory_mib")):
            raise Refused(409, f"{name} does not fit", field)

    def create(self, body):
        spec = body.get("vm", {})
        nominal = vector(spec.get("nominal", {}), "vm.nominal")
        minimum = vector(spec.get("minimum", {}), "vm.minimum")
        fixed, name = spec.get("priority") == "fixed", spec.get("name", "")
        size = vector(body.get("start_size") or nominal, "start_size")
        if name in self.vms:
            raise Refused(409, f"there is a VM {name} already", "vm.name")
        self.require_room(name, size, "vm.nominal")
        floor = {
            part: nominal[part] if fixed else min(max(minimum[part], FLOOR[part]), nominal[part]) for part in PARTS
        }
        row = {"name": name, "host": self.name, "domain": name, "state": "running", "nominal": nominal}
        row["ceiling"] = vector(spec["ceiling"], "vm.ceiling") if spec.get("ceiling") else None  # of harvest VMs
        row |= {"priority": spec.get("priority", "deflatable"), "minimum": floor, "current": size, "generation": 0}
        row |= {"overhead_mib": OVERHEAD_MIB, "guest_connected": False, "guest_kind": "balloon", "held": False}
        self.vms[name] = row | {
            "boot_memory_mib": min(384.0, nominal["memory_mib"]),
            "template": spec.get("template", "lab"),
        }
        return {"vm": name}

    def target(self, name, body):
        vm, wanted = self.vm(name), body.get("target", {})
        vector(wanted, "target")
        size = {part: float(vm["current"][part] if wanted.get(part) is None else wanted[part]) for part in PARTS}
        if body.get("generation", 0) <= vm["generation"]:
            raise Refused(409, f"generation is not above {vm['generation']}", "generation")
        for part in PARTS:
            if not vm["minimum"][part] - 1e-6 <= size[part] <= (vm["ceiling"] or vm["nominal"])[part] + 1e-6:
                raise Refused(400, f"target.{part} is outside of what {name} may have", f"target.{part}")
        vm["generation"], vm["held"] = body["generation"], size != vm["nominal"]
        return self.resize({name: size})

    def reclaim(self, body):
        need, without = vector(body["need"], "need"), body.get("exclude", ())
        rows = [v for v in self.vms.values() if v["state"] == "running" and v["name"] not in without]
        sizes, short = {vm["name"]: dict(vm["current"]) for vm in rows}, {}
        for part in PARTS:  # in proportion to what each has above its minimum
            spare = {vm["name"]: vm["current"][part] - vm["minimum"][part] for vm in rows}
            share = min(need[part] / total, 1.0) if (total := sum(spare.values())) > 0 else 0.0
            short[part] = max(need[part] - total, 0.0)
            for name in sizes:
                sizes[name][part] -= share * spare[name]
        state = "partial" if any(value > 1e-6 for value in short.values()) else "done"
        return self.resize(sizes) | {"state": state, "shortfall": short}

    def reinflate(self, body):
        room, sizes = vector(body["room"], "room") if body.get("room") else self.free(), {}
        for name in body.get("vms") or [name for name, vm in self.vms.items() if not vm["held"]]:
            vm = self.vm(name)
            vm["held"] = False  # a name lets it grow again
            if vm["state"] == "running":
                grown = {part: min(vm["nominal"][part] - vm["current"][part], room[part]) for part in PARTS}
                sizes[name] = {part: vm["current"][part] + grown[part] for part in PARTS}
                room = {part: room[part] - grown[part] for part in PARTS}
        return self.resize(sizes)

    def stop(self, name, body):
        vm = self.vm(name)
        if vm["state"] != "stopped":  # else nothing is left to do, and its size stays
            vm |= {"state": "stopped", "start_size": vm["current"], "current": dict.fromkeys(PARTS, 0.0)}
        return {"vm": name}

    def start(self, name, body):
        vm = self.vm(name)
        if vm["state"] == "stopped":
            size = vector(vm["start_size"] | (body.get("start_size") or {}), "start_size")
            most = vm["ceiling"] or vm["nominal"]
            size = {part: min(max(size[part], vm["minimum"][part]), most[part]) for part in PARTS}
            self.require_room(name, size, "start_size")
            vm |= {"state": "running", "current": size, "start_size": None, "held": False}
        return {"vm": name}

    def delete(self, name, body):
        self.vm(name)
        del self.vms[name]
        return {"vm": name}


class Routes(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        url, host = urlsplit(self.path), self.server.host
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            status, body = self.route(host, url.path.strip("/").split("/"), dict(parse_qsl(url.query)), raw)
        except Refused as error:
            status, body = error.status, error.body
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            status, body = 400, Refused(400, f"the body is none: {error}").body
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if status < 400 else "application/problem+json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def route(self, host, path, query, raw):
        if path == ["healthz"]:
            return 200, {"status": "ok"}
        if self.headers.get("Authorization") != f"Bearer {os.environ['EBB_TOKEN']}":
            raise Refused(401, "the Authorization header must be 'Bearer' with the right token", "Authorization")
        body = json.loads(raw) if raw else {}
        with host.lock:
            match self.command, path[1:]:
                case "GET", ["host"]:
                    return 200, host.report()
                case "GET", ["vms", name]:
                    return 200, host.vm(name)
                case "GET", ["operations", request_id] if request_id in host.done:
                    return 200, host.done[request_id][2]
                case "PUT", ["epoch"]:
                    if body["epoch"] < host.epoch:
                        raise Refused(409, f"epoch {body['epoch']} is over", "epoch")
                    host.epoch = body["epoch"]
                    return 200, body
                case "POST", ["vms"]:
                    return 202, host.command("create", body, host.create)
                case "POST", ["reclaims"]:
                    return 202, host.command("reclaim", body, host.reclaim)
                case "POST", ["reinflations"]:
                    return 202, host.command("reinflate", body, host.reinflate)
                case "PUT", ["vms", name, "target"]:
                    return 202, host.command("target", {**body, "name": name}, lambda body: host.target(name, body))
                case "POST", ["vms", name, ("stop" | "start") as kind]:
                    run = getattr(host, kind)
                    return 202, host.command(kind, {**body, "name": name}, lambda body: run(name, body))
                case "DELETE", ["vms", name]:
                    return 202, host.command("delete", {**query, "name": name}, lambda body: host.delete(name, body))
        raise Refused(404, f"there is nothing at {self.path}")

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def log_message(self, *args):
        pass


def report(host, manager, token):
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    while True:
        with host.lock:
            body = json.dumps(host.report()).encode()
        try:
            url = f"{manager}/v1/hosts/{host.name}/report"
            urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=5).read()
        except OSError as error:
            print(f"the manager does not take the report: {error}", file=sys.stderr)
        time.sleep(2)


def main():
    name, port = sys.argv[1], int(sys.argv[2])
    server = ThreadingHTTPServer(("127.0.0.1", port), Routes)
    url = f"http://127.0.0.1:{server.server_port}"
    server.host = Host(name, url, {"cpu_cores": 8.0, "memory_mib": 8192.0})
    if manager := os.environ.get("EBB_MANAGER"):
        arguments = (server.host, manager, os.environ["EBB_REPORT_TOKEN"])
        threading.Thread(target=report, args=arguments, daemon=True).start()
    print(url, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
