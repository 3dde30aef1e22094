"""What `stormproof.web` offers; this list is the only one."""

from .trident.web.mount import WebApp as WebApp
from .trident.web.mount import web_app as web_app
from .trident.web.people import (
    WebRole as WebRole,
    WebUser as WebUser,
)
