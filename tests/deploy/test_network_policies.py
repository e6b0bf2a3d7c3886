"""Who may reach whom, worked out from the policies as a cluster would, beside who must."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
from manifests import OVERLAYS, Object, of_kind, pods, selects
from roles import METRICS_PORT, ROLES

pytestmark = pytest.mark.outside

NAMESPACE = "outrider"
DRAFT_PORT, TARGET_PORT = ROLES["draft-worker"].port, ROLES["target-worker"].port
COORDINATOR_PORT = ROLES["coordinator"].port
RAY_PORTS = (50100, 50299)
TRIED = (
    22,
    53,
    80,
    443,
    COORDINATOR_PORT,
    DRAFT_PORT,
    TARGET_PORT,
    METRICS_PORT,
    4317,
    6379,
    8265,
    50099,
    *RAY_PORTS,
    50300,
)


@dataclass(frozen=True)
class Party:
    """A pod of ours or of another namespace, or an address outside."""

    name: str
    namespace: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    address: str = ""

    @property
    def is_ours(self) -> bool:
        return self.namespace == NAMESPACE


OTHERS = (
    Party("client", "apps", (("outrider.dev/client", "true"),)),
    Party("client-here", NAMESPACE, (("outrider.dev/client", "true"),)),
    Party("stranger", "apps", (("app", "web"),)),
    Party("prometheus", "monitoring", (("app", "prometheus"),)),
    Party("dns", "kube-system", (("k8s-app", "kube-dns"),)),
    Party("other-system-pod", "kube-system", (("k8s-app", "proxy"),)),
    Party("ray-operator", "ray-system", (("app.kubernetes.io/name", "kuberay-operator"),)),
    Party("internet", address="93.184.215.14"),
    Party("api-server", address="10.96.0.1"),
    Party("metadata", address="169.254.169.254"),
)


def _matches(peer: Object, other: Party) -> bool:
    if "ipBlock" in peer:
        if not other.address:
            return False
        address = ipaddress.ip_address(other.address)
        nets = [ipaddress.ip_network(cidr) for cidr in peer["ipBlock"].get("except", ())]
        return address in ipaddress.ip_network(peer["ipBlock"]["cidr"]) and not any(address in net for net in nets)
    if other.address:
        return False
    if "namespaceSelector" in peer:
        in_namespace = selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": other.namespace})
    else:
        in_namespace = other.is_ours
    return in_namespace and selects(peer.get("podSelector", {}), dict(other.labels))


def _opens(ports: Iterable[Object] | None, port: int, protocol: str) -> bool:
    if ports is None:
        return True
    return any(p.get("protocol", "TCP") == protocol and p["port"] <= port <= p.get("endPort", p["port"]) for p in ports)


def _allows(policies: list[Object], pod: Party, other: Party, direction: str, port: int, protocol: str) -> bool:
    if not pod.is_ours:
        return True
    chosen = [p for p in policies if direction in p["policyTypes"] and selects(p["podSelector"], dict(pod.labels))]
    if not chosen:
        return True
    field, peers = ("egress", "to") if direction == "Egress" else ("ingress", "from")
    return any(
        any(_matches(peer, other) for peer in rule[peers]) and _opens(rule.get("ports"), port, protocol)
        for policy in chosen
        for rule in policy.get(field, ())
    )


def flows(overlay: str, without: str = "") -> Iterator[tuple[str, str, str]]:
    """(from, to, port) of all that gets through, at least one end ours."""
    policies: list[Object] = [p["spec"] for name, p in of_kind(overlay, "NetworkPolicy").items() if name != without]
    ours = [Party(pod.name, NAMESPACE, tuple(pod.labels.items())) for pod in pods(overlay).values()]
    parties = [*ours, *OTHERS]
    for source in parties:
        for destination in parties:
            if not (source.is_ours or destination.is_ours):
                continue
            for port in TRIED:
                for protocol in ("TCP", "UDP"):
                    if _allows(policies, source, destination, "Egress", port, protocol) and _allows(
                        policies, destination, source, "Ingress", port, protocol
                    ):
                        yield source.name, destination.name, f"{port}/{protocol}"


def tcp(source: str, destination: str, *ports: int) -> set[tuple[str, str, str]]:
    return {(source, destination, f"{port}/TCP") for port in ports}


def common(scraped: Iterable[str], everyone: Iterable[str]) -> set[tuple[str, str, str]]:
    """What holds in every overlay."""
    found = tcp("client", "coordinator", COORDINATOR_PORT)
    for name in scraped:
        found |= tcp("prometheus", name, METRICS_PORT)
    for name in (*everyone, "client-here"):
        found |= {(name, "dns", "53/TCP"), (name, "dns", "53/UDP")}
    return found


def test_a_laptops_pods_reach_what_they_need_and_nothing_else() -> None:
    expected = common(ROLES, ROLES)
    expected |= tcp("coordinator", "draft-worker", DRAFT_PORT) | tcp("coordinator", "target-worker", TARGET_PORT)
    assert set(flows("cpu")) == expected


def test_workers_with_models_of_the_hub_may_fetch_them() -> None:
    expected = set(flows("cpu"))
    expected |= tcp("draft-worker", "internet", 443) | tcp("target-worker", "internet", 443)
    assert set(flows("gpu")) == expected


def test_ray_talks_to_itself_and_its_workers_with_the_coordinators() -> None:
    workers, nodes = ("ray-draft", "ray-target"), ("ray-head", "ray-draft", "ray-target")
    expected = common(("coordinator", *workers), ("coordinator", *nodes))
    expected |= tcp("ray-operator", "ray-head", 8265)
    for worker in workers:
        expected |= tcp("coordinator", worker, *RAY_PORTS) | tcp(worker, "coordinator", COORDINATOR_PORT)
        expected |= tcp(worker, "internet", 443)
    for source in nodes:
        for destination in nodes:
            expected |= {(source, destination, f"{port}/{protocol}") for port in TRIED for protocol in ("TCP", "UDP")}
    assert set(flows("ray")) == expected


def test_no_policy_is_idle() -> None:
    """Without any one of them something else opens or closes; so the checks above can fail."""
    for overlay in OVERLAYS:
        whole = set(flows(overlay))
        for name in of_kind(overlay, "NetworkPolicy"):
            assert set(flows(overlay, without=name)) != whole, name
