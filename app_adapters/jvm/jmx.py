"""A JVM's remote management port, spoken by a JVM in this process through JPype (the extra `jmx`; needs a JRE).

Run as a program `jmx.py HOST:PORT`. Each line in is `{"pid": PID, "command": [NAME, ARGUMENT ...]}` or `{"pid": PID,
"set": [FLAG, VALUE]}`, each line out `{"text": ...}` or `{"error": ...}`: this also where a JVM of another pid listens
there. PID is that of the JVM's own namespace, so that two containers with one JVM each are not told apart.
Three beans alone are used: HotSpotDiagnostic, DiagnosticCommand, and of Runtime the name, which begins with the pid.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, Callable

#: jcmd's names and those of the bean's operations (DiagnosticCommandMBean).
OPERATIONS = {
    "VM.flags": "vmFlags",
    "VM.version": "vmVersion",
    "GC.heap_info": "gcHeapInfo",
    "GC.run": "gcRun",
}


def connect(address: str) -> tuple[int, Callable[[dict[str, Any]], str]]:
    """The pid of the JVM in its own namespace, and what carries out a request. Raises: whatever JPype or Java raise."""
    # By name: this room imports the standard library alone, and only this program needs the extra.
    jpype = importlib.import_module("jpype")
    jpype.startJVM("-Xmx32m", "-Xss512k", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", convertStrings=True)
    remote = jpype.JPackage("javax").management.remote
    object_name = jpype.JClass("javax.management.ObjectName")
    strings = jpype.JArray(jpype.JString)
    objects = jpype.JArray(jpype.JObject)
    url = remote.JMXServiceURL(f"service:jmx:rmi:///jndi/rmi://{address}/jmxrmi")
    server = remote.JMXConnectorFactory.connect(url).getMBeanServerConnection()

    def invoke(bean: str, operation: str, arguments: list[Any], types: list[str]) -> str:
        name = object_name(f"com.sun.management:type={bean}")
        return str(server.invoke(name, operation, objects(arguments), strings(types)) or "")

    def carry_out(request: dict[str, Any]) -> str:
        if "set" in request:
            text_type = "java.lang.String"
            return invoke("HotSpotDiagnostic", "setVMOption", list(request["set"]), [text_type, text_type])
        name, *arguments = request["command"]
        # Commands without arguments are operations without parameters.
        if name == "VM.flags":
            return invoke("DiagnosticCommand", OPERATIONS[name], [strings(arguments)], ["[Ljava.lang.String;"])
        return invoke("DiagnosticCommand", OPERATIONS[name], [], [])

    return int(str(server.getAttribute(object_name("java.lang:type=Runtime"), "Name")).partition("@")[0]), carry_out


def main() -> int:
    """Answer lines until their end."""
    # What Java prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    found: tuple[int, Callable[[dict[str, Any]], str]] | None = None
    for line in sys.stdin:
        try:
            if found is None:
                found = connect(sys.argv[1])
            (pid, carry_out), request = found, json.loads(line)
            if pid != request["pid"]:
                answer = {"error": f"process {pid} listens there, not {request['pid']}"}
            else:
                answer = {"text": carry_out(request)}
        except ImportError:
            answer = {"error": f"JPype is not installed ({sys.executable} -m pip install JPype1)"}
        except BaseException as error:  # Java's exceptions are none of Python's
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    status = main()
    # JPype's way out waits for Java's threads.
    os._exit(status)
