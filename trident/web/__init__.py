"""The page: every topology of a ledger in a browser. Extra `web`. There is no build step, and nothing is from elsewhere.

| module | what is it |
| --- | --- |
| `mount` | `web_app`: the page as an ASGI application, alone or mounted in a user's own |
| `app` | the application put together; `ROUTES`: each address with the role that it needs |
| `server` | `stormproof web`: the page on a port of its own |
| `views` | what is shown: one module and one template a view |
| `proposals` | what a person decides: looked at, confirmed, done once |
| `people` | who a request is from, what that person may do; options |
| `shield` | known Host names, headers of a strict page, bounded bodies: around everything; the origin of a change |
| `visit` | one request: who is let in; its route; what all requests share |
| `reading` | the ledger, on threads, in short snapshots, one answer for all who ask at once |
| `render` | templates that escape; others' texts without hidden characters; addresses of the files in `assets` |

In the folder `assets` are scripts and styles, with the versions and hashes of those that are somebody else's.
"""
