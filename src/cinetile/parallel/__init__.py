"""Attention over several devices."""

from cinetile.parallel.collectives import Collective, collectives
from cinetile.parallel.devices import make_mesh, request_cpu_devices
from cinetile.parallel.halo import halo_attention
from cinetile.parallel.processes import joined_processes
from cinetile.parallel.report import ExchangeScheme, exchange_report

__all__ = [
    "Collective",
    "ExchangeScheme",
    "collectives",
    "exchange_report",
    "halo_attention",
    "joined_processes",
    "make_mesh",
    "request_cpu_devices",
]
