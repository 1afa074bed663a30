"""What no schema knows of rendered manifests: that they fit one another and the configuration,
and that the Pod is one which the Pod Security Standard `restricted` lets in.

manifests.py RENDERED CONFIG: reads the one, writes the configuration that the ConfigMap has to the
other, and prints what is wrong, a line each; the exit code is 1 if anything is.
"""

import re
import sys

import yaml

UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


def seconds(duration):
    """10s, 1m30s."""
    return sum(float(n) * UNITS[u] for n, u in re.findall(r"([\d.]+)(ms|s|m|h)", duration))


def port(bind):
    return int(bind.rsplit(":", 1)[1])


def restricted(pod, container):
    """What the standard asks for, but for what these manifests do not use."""
    of_pod, own = pod["securityContext"], container["securityContext"]
    yield of_pod.get("runAsNonRoot") is True, "runAsNonRoot"
    yield of_pod.get("runAsUser", 0) > 0, "runAsUser"
    yield of_pod.get("seccompProfile", {}).get("type") == "RuntimeDefault", "seccompProfile"
    yield own.get("allowPrivilegeEscalation") is False, "allowPrivilegeEscalation"
    yield own.get("capabilities") == {"drop": ["ALL"]}, "capabilities"
    yield not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")), "host…"
    yield not any("hostPort" in one for one in container["ports"]), "hostPort"
    kinds = {kind for volume in pod["volumes"] for kind in volume} - {"name"}
    yield kinds <= {"configMap", "emptyDir", "secret", "projected"}, "volumes"
    # Not of the standard.
    yield own.get("readOnlyRootFilesystem") is True, "readOnlyRootFilesystem"
    yield pod.get("automountServiceAccountToken") is False, "automountServiceAccountToken"
    requests, limits = (container["resources"][key] for key in ("requests", "limits"))
    yield "cpu" in requests and "memory" in requests and "memory" in limits, "resources"


def probes(container, admin):
    names = {one["name"]: one["containerPort"] for one in container["ports"]}
    paths = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for probe, path in paths.items():
        get = container[probe]["httpGet"]
        yield get["path"] == path, f"{probe} asks {get['path']}, not {path}"
        yield names.get(get["port"]) == admin, f"{probe} does not ask the admin address"


def fit(kinds, config):
    deployment, service = kinds["Deployment"], kinds["Service"]
    spec = deployment["spec"]["template"]["spec"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (container,) = spec["containers"]
    for good, key in restricted(spec, container):
        yield good, f"the Pod is not restricted, or not bounded: {key}"
    yield from probes(container, port(config["admin"]["bind"]))

    grace = spec["terminationGracePeriodSeconds"]
    delay, timeout = (seconds(config["drain"][key]) for key in ("delay", "timeout"))
    # Tunnels have a second, the last lines of the log two.
    yield delay + timeout + 3 < grace, f"a drain of {delay} + {timeout} s is killed after {grace} s"
    ready = spec["containers"][0]["readinessProbe"]
    seen = ready["periodSeconds"] * ready["failureThreshold"] + ready["timeoutSeconds"]
    yield seen < delay, f"unready is noticed after {seen} s, and drain.delay is {delay} s"

    listeners = {port(one["bind"]) for one in config["listeners"]}
    names = {one["name"]: one["containerPort"] for one in container["ports"]}
    for one in service["spec"]["ports"]:
        reached = names.get(one["targetPort"])
        yield reached in listeners, f"the Service leads to {reached}, where nobody listens"
    for kind, selector in (
        ("Service", service["spec"]["selector"]),
        ("Deployment", deployment["spec"]["selector"]["matchLabels"]),
        ("PodDisruptionBudget", kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]),
    ):
        yield selector.items() <= labels.items(), f"the {kind} selects other Pods"

    scaler = kinds["HorizontalPodAutoscaler"]["spec"]
    target = {key: scaler["scaleTargetRef"][key] for key in ("kind", "name")}
    own = {"kind": "Deployment", "name": deployment["metadata"]["name"]}
    yield target == own, "the HorizontalPodAutoscaler scales something else"
    yield "replicas" not in deployment["spec"], "each apply would undo what the scaler did"
    yield scaler["minReplicas"] >= 2, "one Pod alone cannot be replaced without a gap"

    (volume,) = spec["volumes"]
    (mount,) = container["volumeMounts"]
    file = f"{mount['mountPath']}/config.yaml"
    named = volume["configMap"]["name"] == kinds["ConfigMap"]["metadata"]["name"]
    yield named, "the volume is another ConfigMap"
    yield container["args"] == ["--config", file], f"the program does not read {file}"


def main():
    rendered, to = sys.argv[1:]
    with open(rendered, encoding="utf-8") as file:
        kinds = {one["kind"]: one for one in yaml.safe_load_all(file)}
    text = kinds["ConfigMap"]["data"]["config.yaml"]
    with open(to, "w", encoding="utf-8") as file:
        file.write(text)
    wrong = [words for good, words in fit(kinds, yaml.safe_load(text)) if not good]
    for words in wrong:
        print(words)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
