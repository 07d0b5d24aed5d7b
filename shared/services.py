"""What heartbeats say of the service that tenants have had, so that workers are fair together and after a death."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.bounds import PeerName, TenantName

MAX_TENANTS = 32
"""Of a lane, those served last, of which a worker tells."""
MAX_AHEAD = 131072.0
"""Virtual tokens by which others' word may put a tenant behind those that wait: seconds of a busy worker."""
MAX_MODELS = 64
"""Of dead workers, of which a gateway tells."""

VirtualTokens = Annotated[float, Meta(ge=0.0, le=1e15)]
Ahead = Annotated[float, Meta(ge=0.0, le=MAX_AHEAD)]


class TenantService(Struct, frozen=True, array_like=True):
    """One tenant's service at a worker since its start, and how far it is above the lowest of those that wait."""

    tenant: TenantName
    served: VirtualTokens = 0.0
    ahead: Ahead = 0.0


Services = Annotated[
    dict[Literal["interactive", "batch"], Annotated[tuple[TenantService, ...], Meta(max_length=MAX_TENANTS)]],
    Meta(max_length=2),
]
"""By lane, the tenants served last."""

ServicesOfModels = Annotated[dict[PeerName, Services], Meta(max_length=MAX_MODELS)]
