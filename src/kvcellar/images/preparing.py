"""preparing: the process in which images are decoded and prepared: `python -m kvcellar.images.preparing SOCKET`. See
`worker`.

It imports transformers and reads the files of the model once, which takes seconds, before its first job; each image has
a fork of its own, so that a codec that is misled by one image never sees another.
"""

import os
from collections.abc import Callable

from msgspec import Raw
from msgspec.structs import replace
from PIL import Image

from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.images.decoding import opened_image, pixels, thumbnail
from kvcellar.images.image import ProcessedImage
from kvcellar.images.store import MEMORY, STACK, Setup
from kvcellar.wire import decode
from kvcellar.worker import serve


def opened(setup: Setup) -> Callable[[Raw], ProcessedImage]:
    Image.MAX_IMAGE_PIXELS = None  # sizes are checked by `opened_image`, which says what is allowed
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    import torch  # not at the top: it reads the environment

    from kvcellar.images.processing import Processor

    torch.set_num_threads(1)  # a fork would wait for threads that it does not have
    try:
        processor = Processor(setup.folder, setup.model, setup.placeholder, setup.most_rows)
    except ModelRefused as error:
        why = f"this model takes no images: {error}"

        def refuse(_: Raw) -> ProcessedImage:
            raise BadRequest(why)

        return refuse

    def prepared(what: Raw) -> ProcessedImage:
        image = opened_image(decode(what, bytes))
        processor.check_rows(*image.size)
        seen = pixels(image)
        return replace(processor.process(seen), thumbnail=thumbnail(seen))

    return prepared


if __name__ == "__main__":
    serve(Setup, opened, stack=STACK, memory=MEMORY)
