"""HTTP/1.1 on asyncio's transports: heads, bodies, connections, the server, and a bridge to ASGI applications."""
