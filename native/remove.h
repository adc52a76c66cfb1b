/* The process that removes trees; the worker's side is in spawner.h. */
#pragma once

#define REMOVER_NAME "remover"

_Noreturn void remover_main(void);
