"""The engines of one tokenizer service and everything that chooses among them, built and kept together.

With `__main__` and `app` a place that builds objects. Must not know: clients, text.
"""

import asyncio
import os
import random
import socket
from collections.abc import Callable

from service_runtime.grpc_server import channel_options
from service_runtime.tls import Dialer, LinkTls
from tokenizer_service.api.engine_fleet_metrics import EngineFigures
from tokenizer_service.api.metrics import TokenizerMetrics
from tokenizer_service.config import TokenizerSettings
from tokenizer_service.engines.connection import ConnectionLimits, EngineConnection
from tokenizer_service.engines.matching import ModelCheck, TokenizerIdentity
from tokenizer_service.engines.one_model import OneModel
from tokenizer_service.engines.prefix_map import PrefixMap
from tokenizer_service.failover.engine_ids import EngineIds
from tokenizer_service.failover.failover import Failover, FailoverLimits
from tokenizer_service.failover.retry_budget import BudgetLimits, RetryBudget
from tokenizer_service.routing.choice import Policy
from tokenizer_service.routing.discovery import DnsDiscovery, Resolve
from tokenizer_service.routing.replicas import STATIC, Replicas
from tokenizer_service.routing.router import MAX_MAP_BLOCKS, Router


class BadEngine(Exception):
    """An address that was given for an engine is none."""


class EngineFleet:
    """Replicas, the router over them, and the failover around it. Build it inside the event loop."""

    def __init__(
        self,
        settings: TokenizerSettings,
        identity: TokenizerIdentity,
        dice: random.Random,
        *,
        resolve: Resolve,
        on_change: Callable[[], None],
        metrics: TokenizerMetrics,
    ) -> None:
        """`on_change` is called when a replica becomes usable or stops being so. Raises BadTls and BadEngine."""
        self._settings = settings
        self._identity = identity
        self._dice = dice
        self._on_change = on_change
        self._metrics = metrics
        link_tls = None if settings.engine_tls is None else LinkTls(settings.engine_tls)
        self._dialer = Dialer(channel_options(), link_tls)
        self.prefixes = PrefixMap(MAX_MAP_BLOCKS)
        self._one_model = OneModel()
        self.replicas = self._new_replicas()
        self._discoveries = tuple(
            DnsDiscovery.of(name, settings.engine_dns_interval, resolve, self.replicas.replace)
            for name in settings.engine_dns
        )
        self.router = Router(
            self.replicas.connections,
            policy=Policy(settings.routing),
            prefixes=self.prefixes,
            dice=dice,
            observe=metrics.count_routed,
        )
        self.failover = self._new_failover()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Connects."""
        self.replicas.start()
        self._tasks = [asyncio.create_task(discovery.run()) for discovery in self._discoveries]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.replicas.close()

    def figures(self) -> list[EngineFigures]:
        """Of each replica, those that leave too."""
        return [_figures(replica.connection) for replica in self.replicas.all()]

    def _new_replicas(self) -> Replicas:
        """With the named engines. Raises BadEngine."""
        replicas = Replicas(self._connection, self._on_change)
        for address in self._settings.named_engines:
            refusal = replicas.add(address, STATIC)
            if refusal is not None:
                raise BadEngine(f"--engine: {refusal.message}")
        return replicas

    def _connection(self, address: str) -> EngineConnection:
        return EngineConnection(
            address=address,
            client_name=f"{socket.gethostname()}:{os.getpid()}",
            check=ModelCheck(self._identity, self._settings.allow_tokenizer_mismatch),
            limits=ConnectionLimits(hang_timeout_s=self._settings.engine_hang_timeout),
            dialer=self._dialer,
            jitter=self._dice.random,
            on_change=self._on_change,
            blocks=self.prefixes.new_holder() if self._settings.routing == Policy.PREFIX.value else None,
            one_model=self._one_model,
        )

    def _new_failover(self) -> Failover:
        settings = self._settings
        clock = asyncio.get_running_loop().time
        budget = BudgetLimits(settings.failover_share, float(settings.failover_burst))
        limits = FailoverLimits(settings.failover_attempts, settings.failover_wait)
        ids = EngineIds(f"{self._dice.getrandbits(64):x}")
        return Failover(self.router, limits, RetryBudget(budget, clock), ids, self._metrics, self._dice.random)


def _figures(engine: EngineConnection) -> EngineFigures:
    return EngineFigures(
        engine=engine.address,
        live_requests=engine.num_live,
        outstanding_tokens=engine.outstanding_tokens,
        breaker_state=engine.breaker.state.value,
        is_connected=int(engine.is_connected),
        prompt_tokens=engine.load.prompt_tokens,
        cached_tokens=engine.load.cached_tokens,
    )
