"""The shard format: elements of a loader as Arrow record batches, one per lane.

``schema`` says how an element's tree becomes columns, ``writer`` encodes a segment, ``reader`` gives the elements back
as views of the bytes. A shard is a plain Arrow IPC stream, readable by any Arrow tool.
"""
